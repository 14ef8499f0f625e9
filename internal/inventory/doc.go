// Package inventory records on a member the objects that were applied to it, per bundle.
//
// A Record holds one bundle: its content, how far its delivery is, one Entry for each object with the UID that the
// member gave it, and the state of each Helm release. A Store keeps the records in Secrets of one namespace of the
// member. The member alone is the source of truth: an agent or a hub that is killed, replaced or restored from a backup
// continues from the records, and only objects with an entry in a record are pruned.
//
// The engine calls Load, changes a copy from Record.Edit, and calls Save before and after it applies objects, and
// Delete after a withdrawal. Package drift calls List once, and then reads the cached records, by their indexes.
//
// With deploymentType Local, the processes of a hub (shards) apply content for other clusters to the cluster of the
// hub. The records of this content have one OwnerScope. Each partition has the records for one of these clusters. A
// Store caches a partition only between Serve and StopServing.
//
// The head Secret of a record has the label towline.dev/record=head and a name that is computed from the OwnerScope and
// the bundle ID. It holds the head as JSON and the content and the entries as compressed JSON. Larger content and
// entries are in chunk Secrets, which are immutable and named by their content.
//
// Invariants:
//
//   - A save writes new chunks first, then the head in one request, then it deletes the chunks that no head names. So a
//     record is complete at every moment, whenever the process is killed.
//   - An entry is saved without a UID before its object is created: without a UID the object may exist or not.
//   - The head is updated with the resourceVersion that was read. A record that another process has changed is not
//     overwritten.
//   - A record that was loaded or saved is never changed. Edit returns a copy to change and save.
//   - The work for an event, a saved record or a list of one partition does not grow with the number of cached records.
//   - Each record belongs to one OwnerScope: a hub and a registration of the cluster with it. Records of other scopes
//     are neither read nor written, with one exception: DeleteRecordsOfOlderRegistrations.
//   - A hub does not trust its members: the size of values and the number of chunks that it reads are limited, and so
//     are the number and the memory of all records (limits.go).
//
// LiveMeta is the state that is compared with an Entry: the ownership labels and annotations of an existing object, and
// the fingerprint of the fields that Towline has set.
//
// Words:
//
//   - tracked: an object with an entry, or the Helm release Secret of a deployed release, see Record.FindTracked.
//   - Helm release Secret: the Secret in which Helm and Towline record one revision of a release.
//   - inline: stored in the head Secret. Cached records lack their inline values, to save memory.
//   - incomplete: a part of the record is missing or cannot be decoded. The bundle must be delivered again.
//   - fingerprint: a digest of the fields that Towline has set on an object (Entry.Fingerprint, LiveMeta.Fingerprint).
//   - marked: has the ownership labels and annotations of a bundle.
//   - requestor: a bundle ID as text, as in the ownership annotations.
//   - owner key: text that combines a bundle ID and an OwnerScope. Two objects with the same key have the same owner.
//   - kept: the bundle lacks the object, but the object is not pruned.
//   - adopted: the object existed before it was applied, so it is never deleted.
//   - claim: the resourceVersion at which an object is taken over from another owner.
//   - competing owner: the bundle that has taken an object over from the bundle of the record.
//   - origin: the Helm release, or the object of the hub, that an object came from.
//   - attempt: the ID of one Helm operation.
//
// Start reading at Record, Entry and Store.Save.
package inventory

// Package inventory records on a member the objects that were applied to it, per bundle.
//
// A Record holds one bundle: its content, how far its delivery is, one Entry for each object with the UID that the
// member gave it, and the state of each Helm release. A Store keeps the records in Secrets of one namespace of the
// member. The member alone is the source of truth: an agent or a hub that is killed, replaced or restored from a backup
// continues from the records, and only objects with an entry in a record are pruned.
//
// The head Secret of a record has the label towline.dev/record=head and a name that is computed from the bundle ID. It
// holds the head as JSON and the content and the entries as compressed JSON. Larger content and entries are in chunk
// Secrets, which are immutable and named by their content.
//
// Invariants:
//
//   - A save writes new chunks first, then the head in one request, then it deletes the chunks that no head names. So a
//     record is complete at every moment, whenever the process is killed.
//   - An entry is saved without a UID before its object is created: without a UID the object may exist or not.
//   - The head is updated with the resourceVersion that was read. A record that another process has changed is not
//     overwritten.
//   - A record that was loaded or saved is never changed. Edit returns a copy to change and save.
//   - Each record belongs to one OwnerScope: a hub and a registration of the cluster with it. Records of other scopes
//     are neither read nor written. Records of earlier registrations with the same hub are deleted after the hub has
//     confirmed the current one.
//
// LiveMeta is the state that is compared with an Entry: the ownership labels and annotations of an existing object, and
// the fingerprint of the fields that Towline has set.
package inventory

// Package release reads and writes Helm's release records on a cluster, and the hooks in them.
//
// A record is the Secret sh.helm.release.v1.<release>.v<revision>, with the labels and the encoding of Helm's storage
// driver, so that the helm command reads it. It holds one revision of one release: the chart's metadata, the values,
// the manifest and the hooks. Every user who may write Secrets can change it, so a record is untrusted input.
//
// The engine decides when a record is written; this package only converts and stores it:
//   - NewRecord converts a Helm item of a bundle to a record (record.go).
//   - Hook describes a hook by its annotations, and ForEvent sorts the hooks of an event (hook.go).
//   - Store lists, reads, writes and deletes the records of one cluster. Entry is the metadata of a record (store.go).
//   - StoredRecord is a record that Store has read, within a limit of memory (storedrecord.go).
//   - Rendering has the revision and the operation that the templates of a revision read (rendering.go).
package release

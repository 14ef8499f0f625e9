// Package release reads and writes Helm's release records on a cluster, and the hooks in them.
//
// A record is the Secret sh.helm.release.v1.<release>.v<revision>, with the labels and the encoding of Helm's storage
// driver, so that the helm command reads it. It holds one revision of one release: the chart's metadata, the values,
// the manifest and the hooks. Every user who may write Secrets can change it, so a record is untrusted input.
//
// The engine decides when a record is written; this package only converts and stores it:
//   - NewRecord makes a record of a Helm item of a bundle. StoredRecord is a record that was read, with limited memory.
//   - Hook describes a hook by its annotations, ForEvent sorts the hooks of an event.
//   - Store lists, reads, writes and deletes the records of one cluster.
package release

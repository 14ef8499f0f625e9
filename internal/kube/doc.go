// Package kube defines the scheme, labels and identity of objects, and reads manifests and API responses within limits
// of memory.
//
// Nearly all other packages of Towline use it. It has these parts:
//
//   - Objects: Scheme (scheme.go), Ref (ref.go), labels, annotations and finalizers (labels.go), PodStatus (pod.go).
//   - Manifests: DecodeManifest (manifest.go) decodes YAML or JSON, after CountValues (values.go, aliases.go) has
//     estimated the cost. Documents (documents.go) caches the JSON of a list of objects.
//   - APIs of a cluster: Discovery (discovery.go) and Mapper (mapper.go), which finds the resource of a kind.
//   - Requests: RetryOnConflict (retry.go), RetryConnection (reconnect.go), DetectRestore (restore.go), Interruptible
//     (interrupt.go), EnsureAdmissionPolicy (admission.go).
//   - Limits: Budget (limit.go) for the bytes and values of responses, ResponseMemory (responsememory.go) for their
//     memory, LimitedStore (lists.go) for the lists of a reflector, ContentMemory (contentmemory.go) for content.
//
// The limits exist because a member can be hostile: its API server, and the texts of its users, must not exhaust the
// memory of the hub. A response is limited in this order: ResponseMemory.Limit wraps its body, the body scans the JSON
// without decoding it (jsonScanner), reserves the estimated memory, and releases it when the response must be decoded.
// A kept object needs another Reservation. ContentMemory does the same for rendered content.
//
// These words have one meaning:
//
//   - A value is a JSON or YAML value: an object, an array, a text, a number, a boolean or null.
//   - A Reservation is a changeable amount of memory in bytes. It limits only this amount: nothing is allocated.
//   - Uncounted bytes are the first bytes of a Reservation, which need no memory of the total.
//   - The namespace of a Reservation is the hub namespace of the cluster for which it is. Each has its own limit.
//   - Content is the charts, manifests and objects that the hub renders and delivers.
//
// Start reading at the part that you need; for the limits at ResponseMemory.
package kube

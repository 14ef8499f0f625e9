// Package fluxsources watches Flux sources on the hub. It watches a kind only while a summary refers to it and its CRD
// is installed, which can be after the start of the hub. Package summaries adds the Watcher, and gets its changes.
package fluxsources

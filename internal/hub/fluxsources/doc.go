// Package fluxsources watches the sources of Flux on the hub. It watches a kind only while a summary refers to it, and
// begins when the kind's CRD is installed, also after the hub has started.
package fluxsources

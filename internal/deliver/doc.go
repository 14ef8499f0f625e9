// Package deliver carries bundles to members and reports back, by push or by pull.
package deliver

// Package bundle defines the Bundle that a hub delivers to a member, and the Report that it gets back.
package bundle

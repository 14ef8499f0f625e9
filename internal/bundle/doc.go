// Package bundle defines the two values that travel: Bundle going down and Report coming up.
package bundle

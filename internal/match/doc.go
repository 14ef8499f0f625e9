// Package match decides which profiles land on which members, in what order and how many at once.
package match

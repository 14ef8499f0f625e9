// Package outdated tells which of the Helm charts that are deployed have a newer version in their repository.
package outdated

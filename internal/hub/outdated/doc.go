// Package outdated reports the deployed Helm charts that have a newer version in their repository, as metrics.
package outdated

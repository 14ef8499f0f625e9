// Package outdated reports the deployed Helm charts that have a newer version in their repository, as metrics.
//
// The hub adds one Checker. Start reading at Checker.Check, which sends one query per repository and stores the newest
// versions. Collect compares them with the deployed versions at each scrape.
package outdated

// Package match computes the members of each profile, and the profile that manages each Helm release.
//
// hub/profiles parses the selector and the references of a profile (NewSelection), lists its members
// (Selection.Members), and gives each of them a ClusterSummary: its name is SummaryName, and PullMembersAnnotation on
// it has the number of pull members. hub/summaries finds the releases that another summary of the same member manages
// (FindConflicts), and does not deploy them.
//
// Start reading at Selection in members.go and FindConflicts in release.go.
package match

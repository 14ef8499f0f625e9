// Package chaos kills and disconnects the programs of a fleet at random times, while profiles, labels and clusters
// change, and compares the fleet with a model after it has settled.
//
// The fleet is a hub, two members in push mode and three in pull mode, all with real API servers. Each round makes a
// plan of changes and faults from the seed and the number of the round, so that a plan can be repeated; the processes
// still run at their own speed. After a round:
//
//   - each member holds exactly the objects of the profiles that select it: of all kinds, with their whole content;
//   - objects of others on the members and on the hub are as they were, with their namespaces, and so are a label of
//     others on managed objects and the object that a profile adopts;
//   - no hook ran twice for a revision of a release, or for an uninstallation;
//   - no program has crashed, and the hub has ended by itself only because it lost leadership or could not start;
//   - there is a summary for each match, a group for each summary in pull mode, a ClusterConfiguration for each member,
//     and no other one, and each status is true;
//   - nothing of a member that left is on the member and on the hub, except for the documented objects.
//
// Start reading at TestChaos. Run it with `make chaos`.
package chaos

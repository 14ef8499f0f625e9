// Command scale measures a hub with many clusters: a real hub process, a real API server, and simulated agents that
// share this process. It prints a table per scenario, or with --json a JSON object.
//
// A simulated agent has the hub side of a real one: its own credential and connection, the watch on its groups, the
// fetch of content, the Lease and the reports. Its engine applies nothing, so that thousands fit into one process. The
// figures are lower bounds for the hub: hub, API server and agents share the processors of one machine.
//
// Run it with make scale SCALE_FLAGS="--clusters=1000".
package main

// Package karmada is the pull-mode agent of a Cluster: it applies Works and bundles on its member and reports to the
// hub.
//
// The command `towline karmada-agent` calls Run, which ends with its context, after the agent has uninstalled itself,
// or if the Cluster belongs to another member. The shared parts are in internal/agent/session; Works are applied by
// internal/works.
//
// The steps of an agent:
//
//  1. Options.complete validates the flags (options.go), and Run starts the probes (agent.go).
//  2. runElection elects one of several agents by a Lease on the member (election.go). Without leader election the
//     agent works at once.
//  3. runSession reads the kubeconfig of the hub and the agent's state from the credential store: a Secret of the
//     member, or a file (credentialstore.go). It starts the engine for the known Cluster first, so that drift is
//     corrected while the hub is away (enginerunner.go).
//  4. It connects to the hub (hubtransport.go) and verifies that the Cluster is this member (hubsession.go).
//  5. Until the session ends it runs in parallel: heartbeats and the status of the Cluster (status.go), Works
//     (works.go), bundles of profiles (session.Worker), and the renewal of the certificate (rotation.go).
//  6. A session ends when its kubeconfig or its Cluster is replaced, and the next one begins. If the hub requests the
//     removal, the agent uninstalls itself (uninstall.go, uninstaller.go).
//
// Words:
//
//   - member: the cluster of this agent; hub: the management cluster.
//   - session: the work for the hub with one kubeconfig and one Cluster object.
//   - leader: the elected agent. Only the leader changes the member, because the gate of the others is closed. A leader
//     whose member does not answer loses the election, and keeps reporting until another agent reports.
//   - superseded: another agent sends heartbeats while this one is not the leader. It then ends its sessions.
//   - delivery: a request of the hub to apply or remove a bundle of a profile.
//   - state: the UIDs of the Cluster and the hub, and the requested lifetime of the certificate; kept on the member.
//   - state object: the Secret or ConfigMap that has the state, and during an uninstallation its progress.
//   - rejected: the hub does not accept the certificate.
//   - missing: the hub returns NotFound or Forbidden for the Cluster.
//
// Start reading at Run, runSession and hubSession.run.
package karmada

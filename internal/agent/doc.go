// Package agent is the pull-mode agent of a SveltosCluster: it applies bundles on its member and reports to the hub.
//
// The command `towline agent` calls Run, which ends with its context, or after the agent has uninstalled itself. The
// parts that this agent shares with the agent of a Karmada Cluster (package karmada) are in package session.
//
// The steps of an agent:
//
//  1. Options.complete sets the defaults (options.go), and Run starts the probes, the checks of the SveltosCluster
//     (checks.go) and the reader of the member's facts (clusterfacts.go, kinds.go).
//  2. If the cluster was not paused at the last contact with the hub, the engine starts. It corrects drift from the
//     inventory on the member, also while the hub is away (agent.go).
//  3. runSession opens the credential, which is in a Secret of the member, and exchanges the manifest's token for
//     the agent's own (package credentials). If an uninstallation has begun, runSession only continues it
//     (hubsession.go).
//  4. claimLeaseWithRetry waits until the hub accepts the credential, and claims the Lease of the cluster, so that only
//     one member uses a registration (duplicateregistration.go).
//  5. Until the session ends it runs in parallel: heartbeats (heartbeats.go), the status of the SveltosCluster
//     (status.go), bundles (session.Worker), and the renewal of the credential (credentials.Credential).
//  6. A session ends when the cluster is registered again or another member takes the registration over, and the next
//     one begins. If the hub requests the removal, the agent uninstalls itself (uninstall.go, uninstaller.go).
//
// Words:
//
//   - member: the cluster of this agent; hub: the management cluster.
//   - registration: the credential, the Lease and the SveltosCluster of one name on the hub.
//   - manifest: the YAML that `sveltosctl register cluster` prints, with the agent's Deployment and the Secret with its
//     credential.
//   - claim: write the ID of the member into an annotation of the Lease. Then this member uses the registration.
//   - session: the work for the hub with one credential.
//   - facts: the version and the served kinds of the member. Definition: a CustomResourceDefinition or an APIService,
//     which changes the served kinds.
//   - checks: the readiness and liveness checks in the spec of the SveltosCluster.
//   - paused: the engine applies and corrects nothing. A cluster that is being deregistered is not paused.
//   - delivery: a request of the hub, in a ConfigurationGroup, to apply or remove one bundle.
//   - unrequested: a bundle on the member without a ConfigurationGroup on the hub. The heartbeat reports it.
//   - rejected: the hub does not accept the credential (Unauthorized).
//   - removal request: an annotation on the SveltosCluster that is being deleted. The agent answers in its status.
//
// Start reading at Run, runSession and hubSession.run.
package agent

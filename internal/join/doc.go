// Package join brings a cluster into the fleet by kubeconfig, CSR or bootstrap token, and rotates its credentials.
//
// sveltosctl calls RegisterPull, RegisterAndApply, RegisterPush, RegisterWorkload, Deregister and GenerateKubeconfig.
// The hub calls Establish and Manifests.Reconcile for each SveltosCluster in pull mode, Renewal for push mode, and
// DeleteHubObjects and DeleteMemberObjects when a SveltosCluster is deleted. Start reading at RegisterPull (pull.go).
//
// Its steps, in pull mode, are:
//
//  1. Render the agent's manifest once, to find invalid options and patches (options.go, patches.go, manifest.go).
//  2. Apply the SveltosCluster (registration.go).
//  3. Claim a delivery namespace (delivery.go), and create the agent's identity (Establish).
//  4. Request a token that is bound to the registration Secret, and print the manifest with it. RegisterAndApply
//     (apply.go) applies the manifest to the member instead, and waits until the cluster is ready.
//
// In push mode (push.go) the hub gets a given kubeconfig, or one for an identity that is created on the member
// (member.go). workload.go is for clusters to which the hub connects with its cloud identity. renew.go renews tokens.
// deregister.go deletes a SveltosCluster and waits for the hub; hubcleanup.go deletes the objects of its registration.
//
// Terms:
//   - registration: the objects of one cluster on the hub. The registration label marks them, with the name of the
//     cluster. An object without it is foreign, and is neither changed nor deleted.
//   - identity: a ServiceAccount with its RBAC. The agent has one on the hub (Establish), the hub has one on a member
//     in push mode (memberIdentity).
//   - anchor Secret: an empty Secret to which the tokens of an agent are bound. Its deletion invalidates them.
//   - registration Secret: the Secret to which the token in a manifest is bound. While the cluster waits for its agent,
//     the hub keeps a manifest in it.
//   - claim: the annotation on a delivery namespace that names its holder, the only cluster that may use it.
//   - deliveries: the groups, contents and content key in a delivery namespace.
//
// Rollback: the SveltosCluster owns the objects in its namespace. A registration that fails restores an existing
// SveltosCluster, or deletes a new one with all its objects. Establish is never rolled back: it can be repeated.
package join

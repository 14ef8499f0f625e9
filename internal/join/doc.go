// Package join brings a cluster into the fleet by kubeconfig, CSR or bootstrap token, and rotates its credentials.
//
// sveltosctl calls RegisterPull, RegisterAndApply, RegisterPush, RegisterWorkload, Deregister and GenerateKubeconfig.
// The hub calls Establish and Manifests.Reconcile for each SveltosCluster in pull mode, Renewal for push mode, and
// Retract and RetractMember when a SveltosCluster is deleted. The package has these parts:
//
//   - registration.go: the objects of one registration on the hub, and their rollback.
//   - pull.go, options.go, patches.go: pull mode. The steps are: apply the SveltosCluster; claim a delivery
//     namespace (delivery.go); create the identity of the agent (establish.go); request a token that is bound to the
//     registration Secret; print the manifest. apply.go applies the manifest to the member as well.
//   - manifest.go: the manifest of the agent. The registration Secret keeps it and its token until the agent connects.
//   - token.go: the claims of tokens, by which they are renewed. tokenpolicy.go limits the tokens of agents.
//   - push.go, member.go: push mode, with a given kubeconfig or with an identity that is created on the member.
//     workload.go is for clusters that the hub dials with its cloud identity. renew.go renews tokens.
//   - deregister.go deletes a SveltosCluster and waits until the hub has deregistered it; retract.go deletes the
//     objects of a registration on the hub, and lists those with the same names that Towline did not create.
//
// Terms: the registration label marks objects that a registration created, with the name of the cluster. An object
// without it belongs to another party, and is neither changed nor deleted. The agent's tokens are bound to the anchor
// Secret, and the tokens in manifests to the registration Secret: they become invalid when the Secret is deleted. An
// annotation on a delivery namespace, the claim, names the cluster that uses it, the holder.
//
// Rollback: the SveltosCluster owns the objects in its namespace. A registration that fails restores the
// SveltosCluster, or deletes the one that it created with all its objects. Establish is never rolled back: it can be
// repeated.
package join

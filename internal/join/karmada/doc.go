// Package karmada registers and deregisters clusters through Karmada's Cluster API, as karmadactl does.
// Start reading at Join.
//
// The CLI calls Join and Unjoin for clusters in push mode, and DeleteCluster for clusters in pull mode. The hub calls
// CreateCluster when it approves the registration of an agent, and ReserveID, EnsureExecutionNamespace,
// DeleteMemberObjects and DeleteHubObjects when it reconciles a Cluster.
//
// Join creates, in this order:
//
//  1. the Cluster, with unfinishedAnnotation. Of several runs with the same name and different clusters, only one
//     succeeds: the API server rejects the others.
//  2. the reservation of the cluster's ID: a ConfigMap whose name contains the ID (ReserveID). Of several Clusters with
//     the same ID, only one gets the reservation. The runs of the others delete their Clusters again.
//  3. the objects on the member: the hub's ServiceAccount with all permissions, and the impersonator, with which hubs
//     impersonate their users (memberRegistration).
//  4. the Secrets with the tokens on the hub. The hub watches them and connects to the member.
//
// Then Join removes unfinishedAnnotation. All writes can be repeated: if a run is killed, the next run with the same
// name and ID writes all objects again. If a run fails, package rollback rolls back its writes on the hub: it deletes
// the Cluster, waits until the hub has completed the deletion, and deletes the Secrets. Then Join deletes the objects
// on the member, as Unjoin does, unless another run has created or written them.
//
// Terms:
//   - ID: the uid of the member's kube-system namespace. The hub has an ID of the same kind, its hubID.
//   - owner, on the hub: the Cluster in the label clusterLabel of an object (SetOwnerLabels).
//   - owner, on the member: the ClusterRole of a registration. Its deletion deletes the other objects. The impersonator
//     has several owners: the ClusterRoles of all hubs that use it.
//   - foreign: without the label clusterv1alpha1.SystemLabel. A registration never changes or deletes such an object.
//
// The namespace on the member is deleted only if a registration created it and it contains no foreign objects.
package karmada

// Package karmada registers and deregisters clusters through Karmada's Cluster API, as karmadactl does.
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
//  3. the objects on the member: the hub's ServiceAccount with all permissions, and the impersonator
//     (memberRegistration).
//  4. the Secrets with the tokens on the hub. The hub watches them and connects to the member.
//
// Then Join removes unfinishedAnnotation. All writes can be repeated: if a run is killed, the next run with the same
// name and ID writes all objects again. If a run fails, package rollback takes back its writes on the hub: it deletes
// the Cluster, waits until the hub has completed the deletion, and deletes the Secrets. Then Join removes the objects
// on the member, as Unjoin does, unless another run has created or written them.
//
// A registration never changes or deletes an object without the label clusterv1alpha1.SystemLabel. On the hub, objects
// of a Cluster have its name in a label (SetOwnerLabels). On the member, the ClusterRole of a registration owns its
// other objects, so that the member's garbage collector deletes them with it. The impersonator is owned by the
// ClusterRoles of all hubs that use it. The namespace is deleted only if a registration created it and it contains no
// foreign objects.
package karmada

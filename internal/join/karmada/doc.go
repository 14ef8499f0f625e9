// Package karmada registers and deregisters clusters through Karmada's Cluster API, as karmadactl does.
//
// The CLI calls Join and Unjoin for clusters in push mode, and DeleteCluster for clusters in pull mode. The hub calls
// CreateCluster when it approves the registration of an agent, and ReserveID, AdoptExecutionNamespace, AdoptSecrets,
// DeleteMemberObjects and DeleteHubObjects when it reconciles a Cluster.
//
// Join creates, in this order:
//
//  1. the Cluster, with the annotations unfinishedAnnotation and attemptAnnotation (CreateCluster). Of several runs
//     with the same name, only one succeeds: the API server rejects the others.
//  2. the reservation of the cluster's ID: a ConfigMap whose name contains the ID (ReserveID). Of several Clusters with
//     the same ID, only one gets the reservation. The runs of the others delete their Clusters again.
//  3. the objects on the member: the hub's ServiceAccount with all permissions, and the impersonator
//     (memberRegistration).
//  4. the Secrets with the tokens on the hub. The hub watches them and connects to the member.
//
// Then Join removes unfinishedAnnotation. A run is one call of Join; its random ID is the attempt. All writes can be
// repeated. If a run is killed, the next run with the same name and ID writes its own attempt to the Cluster and
// continues (resume). A run that no longer finds its attempt on the Cluster fails without a rollback. It checks this
// before it writes to the member, and before each write to the hub. If a run fails for another reason, it deletes the
// Cluster, waits until the hub has completed the deletion, and deletes the remaining objects on both sides.
//
// A registration never changes or deletes an object without the label clusterv1alpha1.SystemLabel. On the hub, objects
// of a Cluster have its name and UID in labels (SetOwner). On the member, a registration has own objects, with the ID
// of the hub in an annotation, and shared objects, with one annotation for each cluster of each hub that uses them.
// Deregistering the last cluster that uses a shared object deletes it; the namespace is deleted only if it contains no
// foreign objects. All objects on the member record the UID of the Cluster and the attempt of the run that wrote them,
// so that a rollback keeps the objects of a later Cluster.
package karmada

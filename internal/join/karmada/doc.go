// Package karmada brings clusters into the fleet, and out of it, as karmadactl does.
//
// The CLI calls Join and Unjoin for clusters in push mode, and DeleteCluster for clusters in pull mode. The hub calls
// CreateCluster when it approves the registration of an agent, and ReserveID, AdoptExecutionNamespace, AdoptSecrets,
// DeleteMemberObjects and DeleteHubObjects when it reconciles a Cluster.
//
// Join creates, in this order:
//
//  1. the Cluster, with annotations for its unfinished registration and for the run (CreateCluster). The API server
//     accepts one of several Clusters with the same name.
//  2. the reservation of the cluster's ID: a ConfigMap whose name contains the ID (ReserveID). The API server accepts
//     one of several Clusters with the same ID. The others are deleted again.
//  3. the objects on the member: the hub's ServiceAccount with all permissions, and the impersonator (memberObjects).
//  4. the Secrets with the tokens on the hub. The hub watches them and connects to the member.
//
// Then it removes the annotation for the unfinished registration. All writes can be repeated. If a run is killed, the
// next one with the same name and ID puts its own annotation on the Cluster and continues. A run that does not find its
// annotation on the Cluster ends without a rollback; it reads the annotation before it writes to the member, and before
// each write to the hub. If a run fails, it deletes the Cluster, waits until the hub has completed the deletion, and
// deletes the remaining objects on both sides.
//
// A registration never changes or deletes an object without the label of the system. On the hub, objects of a Cluster
// have its name and UID in labels (SetOwner). On the member, own objects have the ID of the hub in an annotation.
// Shared objects have an annotation for each cluster of each hub that uses them. The last one deletes them, the
// namespace only if it holds no foreign objects. All objects on the member record the UID of the Cluster and the run
// that wrote them: a rollback keeps the objects of a later Cluster.
package karmada

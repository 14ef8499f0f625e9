// Package register registers a cluster with a Karmada control plane in pull mode, from beside the cluster, and
// unregisters it. karmadactl register and karmadactl unregister call it.
//
// Register connects to the cluster with the caller's kubeconfig, and to the control plane with a bootstrap token. Its
// steps are:
//
//  1. preflight reads the namespace of the agent and sets the mode: a new agent, the completion of a registration that
//     was killed, or a new certificate for the running agent.
//  2. bootstrap verifies the control plane and requests a certificate for the agent. The control plane makes the
//     Cluster when it approves the request.
//  3. awaitAccess waits until the agent's certificate gives access to its Cluster.
//  4. applyObjects makes the Namespace, the Secret with the kubeconfig, the ServiceAccount and the ClusterRoleBinding.
//     The Secret is the reservation of the namespace: it has the uid of the run, and the mark that the registration is
//     not complete.
//  5. apply makes the Deployment, awaitReady waits until the agent runs and its Cluster is ready, and complete removes
//     the mark.
//
// After a failure or an interruption rollBack deletes the Cluster, and then cleans up the cluster. It deletes only
// objects that this run wrote or, if it resumed a registration, objects of that, and nothing if the Secret is that of
// another run. A renewal restores the earlier content of the objects instead.
//
// Unregister has the control plane delete the Cluster and waits for that, with the caller's or the agent's kubeconfig.
// Then it cleans up the cluster with the same code as rollBack. It deletes the Secret last, so that it can be repeated
// until everything is deleted.
//
// Several agents on one cluster, each in a namespace of its own, share a ClusterRole and a ClusterRoleBinding. The
// last one deletes both. Namespaces are deleted if a registration or an agent made them and they have no objects of
// others, see package foreign.
package register

// Package register registers a cluster with a Karmada control plane in pull mode, and unregisters it. It runs outside
// the cluster: karmadactl register and karmadactl unregister call it. Start reading at Register.
//
// Register connects to the cluster with the caller's kubeconfig, and to the control plane with a bootstrap token. Its
// steps are:
//
//  1. preflight reads the agent's objects on the cluster and sets the mode: a new agent, the completion of a
//     registration that was killed, or a new certificate for the running agent.
//  2. requestCertificate verifies the control plane and requests a certificate for the agent. The control plane creates
//     the Cluster when it approves the request.
//  3. awaitAccess waits until the agent's certificate gives access to its Cluster.
//  4. applyObjects writes the ClusterRole, the Namespace, the Secret with the kubeconfig, the ServiceAccount and the
//     ClusterRoleBinding. The ClusterRole reserves the namespace. Its name is derived from the namespace (AgentRole),
//     so a second run for the namespace finds it and stops. Its annotations are the uid of the run and the mark of an
//     unfinished registration. It owns the other objects, so that its deletion deletes them.
//  5. applyObject writes the Deployment, awaitReady waits until the agent runs and its Cluster is ready, and
//     removeUnfinishedMark removes the annotation for the unfinished registration.
//
// After a failure or an interruption rollBack deletes the Cluster from the control plane, and then the registration
// from the cluster. If another run has written the ClusterRole since, the objects belong to that run and stay. After a
// failed renewal, rollBack restores the earlier content of the objects instead.
//
// Unregister deletes the Cluster with the caller's or the agent's kubeconfig, and waits until the control plane has
// completed the deletion. Then it deletes the registration from the cluster with the same code as rollBack, the
// ClusterRole last, so that an interrupted run can be repeated.
//
// Several agents on one cluster, each in a namespace of its own, have ClusterRoles of their own. A namespace is deleted
// if a registration or an agent created it and it holds no foreign objects, see package foreign.
//
// Terms:
//   - cluster: the cluster that is registered. Its client is memberClient.
//   - Cluster: the API object on the control plane. Messages use Karmada's term, control plane; the code uses hub.
//   - attempt: the uid of a run, see package rollback.
//   - id: the uid of a cluster's kube-system namespace.
//   - cleanup: the deletion of a registration from the cluster, by rollBack or Unregister.
//   - uninstallation: the same deletion by the agent itself, after the deletion of its Cluster. Register waits for the
//     end of a deletion of either kind.
package register

// Package approvals approves or denies the CertificateSigningRequests of agents: of new clusters, which register with a
// bootstrap token, and of registered clusters, whose agents renew their certificate.
//
// The hub of the default shard runs Controller. The steps for a request are:
//
//  1. Deny it if the requester creates requests faster than requestInterval. Validate it, and check its deadline and
//     the number of requests of the requester.
//  2. Check the requester's RBAC, and ensure the admission policy that limits the writes of agents.
//  3. For a registration: reserve the token for the cluster, create or adopt the Cluster, and create the agent's RBAC.
//     For a renewal: read the Cluster.
//  4. Allow the requester to read the answer, and approve the request.
//
// A step denies the request by a DeniedError. Before the denial is written, the Cluster and the token's annotations are
// rolled back, unless another request uses them.
//
// Terms:
//
//   - complete: a registration is complete when its Cluster has been ready for completionDelay. Until then, and for at
//     most executionnamespaces.RegistrationTimeout, it can be retried with the same token.
//   - bound: the groups of a token name the only Cluster for which it was created (bootstrap.BoundCluster).
//   - reserved: a token was used for a cluster (kube.AnnotationRegistered), and cannot register another one.
//   - restricted: a token is valid for the Cluster with one UID only (clusterUIDAnnotation). A token is restricted when
//     its registration is complete. A bound token is also restricted when it adopts a Cluster.
//
// Invariants:
//
//   - The hub can crash between any two requests to the API server: all progress is in annotations. requestsAnnotation
//     records the requests that use an object.
//   - A token registers at most one cluster.
//   - A removed Cluster is not created again by the token that registered it.
//   - No agent gets a certificate while the admission policy is not in effect.
//
// Start reading at Controller.Reconcile in controller.go; the steps are in csr.go, steps.go, tokenuse.go and
// cluster.go. ValidateCSR rejects requests that no agent may make. The other steps check whether this requester may
// make this request.
package approvals

// Package bootstrap implements the TLS bootstrap of agents, as Karmada does: a cluster requests the certificate of its
// agent from the hub with a bootstrap token. Start reading at RequestCertificate.
//
// The steps on the hub are:
//
//  1. cli calls EnsureHubObjects when the hub starts. It creates the objects for registrations with tokens.
//  2. An operator calls CreateToken, ListTokens and DeleteToken with karmadactl token.
//  3. package hub/approvals approves requests. It calls EnsureAgentPolicy, EnsureCSRReadRBAC and EnsureAgentRBAC.
//     hub/executionnamespaces calls EnsureAgentRBAC too, to correct changes.
//
// The steps on the side of the cluster, in package register and in the agent, are:
//
//  1. Discovery finds the certificate authorities of the hub. It reads the ConfigMap cluster-info anonymously. It
//     verifies the signature of the ConfigMap with the token, and the certificate authorities with pins of their keys.
//  2. RequestCertificate generates a key, creates a CertificateSigningRequest as the holder of the token or as the
//     agent, and waits for the certificate.
//
// Terms:
//   - bootstrap token: a Secret of Kubernetes with a public id and a secret. Its holder may request a certificate.
//   - bound token: a token for one Cluster only. Its auth-extra-groups have the group of the Cluster (BoundCluster).
//   - agent: its user on the hub is AgentUserPrefix + the name of the Cluster, its group is AgentsGroup. RBAC gives it
//     access to the objects with the name of the Cluster, and to the objects in its execution namespace. The
//     ValidatingAdmissionPolicy of EnsureAgentPolicy limits the fields that it may change.
//   - pin: the hash of the public key of a certificate authority of the hub.
package bootstrap

// Package bootstrap implements the TLS bootstrap of agents, as Karmada does: a cluster requests the certificate of its
// agent from the hub with a bootstrap token.
//
// On the side of the cluster, package register and the agent call:
//
//   - Discovery, which finds the certificate authorities of the hub. It reads the ConfigMap cluster-info
//     anonymously. It verifies the signature of the ConfigMap with the token, and the certificate authorities with
//     pins of their keys.
//   - RequestCertificate, which generates a key, creates a CertificateSigningRequest as the holder of the token or as
//     the agent, and waits for the certificate.
//
// On the hub:
//
//   - EnsureHubObjects creates the objects for registrations with tokens. cli calls it when the hub starts.
//   - CreateToken, ListTokens and DeleteToken are the commands of karmadactl token.
//   - EnsureAgentPolicy, EnsureCSRReadRBAC and EnsureAgentRBAC are steps of the approval in package hub/approvals.
//     EnsureAgentRBAC is also called by hub/spaces, which corrects changes.
//
// A token is bound to a Cluster if its auth-extra-groups have that Cluster's group (see BoundCluster). The user of an
// agent is AgentUserPrefix + name, its group is AgentsGroup. RBAC gives the agent access to the objects with the name
// of its Cluster and to the objects in its execution namespace. The ValidatingAdmissionPolicy of EnsureAgentPolicy
// limits the fields that it may change.
package bootstrap

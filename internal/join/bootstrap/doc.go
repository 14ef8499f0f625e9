// Package bootstrap gives a cluster with a bootstrap token a certificate on the hub, as Karmada does.
//
// On the side of the cluster, package register and the agent call:
//
//   - Discovery, which finds the certificate authorities of the hub. It reads the ConfigMap cluster-info anonymously,
//     and verifies its signature with the token and its authorities with pins of their keys.
//   - RequestCertificate, which generates a key, creates a CertificateSigningRequest as the holder of the token or as
//     the agent, and waits for the certificate.
//
// On the hub:
//
//   - EnsureHubObjects creates the objects for registrations with tokens. cli calls it when the hub starts.
//   - CreateToken, ListTokens and DeleteToken are the commands of karmadactl token.
//   - ValidateCSR, HasAgentPolicy, EnsureCSRReadRBAC and EnsureAgentRBAC are steps of the approval in package
//     hub/approvals. ValidateCSR parses a request and refuses every one that no agent may have; the approver decides
//     about the requester. EnsureAgentRBAC is also called by hub/spaces, which corrects changes.
//
// A token is bound to a Cluster if its auth-extra-groups have that Cluster's group (see BoundCluster). The user of an
// agent is AgentUserPrefix + name, its group is AgentsGroup. RBAC permits it the objects with the name of its Cluster
// and the objects in its execution namespace; the ValidatingAdmissionPolicy
// of EnsureAgentPolicy restricts the fields that it may change.
package bootstrap

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
//   - Prepare creates the objects for registrations with tokens. cli calls it when the hub starts.
//   - CreateToken, ListTokens and DeleteToken are the commands of karmadactl token.
//   - ValidateCSR, HasPolicy, EnsureCSRReadRBAC and EnsureAgentRBAC are steps of the approval in package
//     hub/approvals. ValidateCSR parses a request and refuses every one that no agent may have; the approver decides
//     about the requester. EnsureAgentRBAC is also called by hub/spaces, which corrects changes.
//
// A token is bound to a Cluster if it is in that Cluster's group. An agent is the user AgentUserPrefix + name in the
// group AgentsGroup. Its permissions are by object name and by its execution namespace; the ValidatingAdmissionPolicy
// of EnsurePolicy restricts the fields that it may change.
package bootstrap

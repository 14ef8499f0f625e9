// Package attacks tries what a tenant, an agent or the administrator of a member could do to the rest, with the
// credentials that they have. There is one test per kind of attack in the threat table of SECURITY.md.
//
// All tests share one hub, which runs in this process. A tenant is a ServiceAccount with all rights on Towline's kinds
// and on ConfigMaps of its namespace, and none on Secrets.
package attacks

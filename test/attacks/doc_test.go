// Package attacks tests attacks of a tenant, an agent or the administrator of a member on other users, with their own
// credentials. There is one test for each kind of attack in the threat table of SECURITY.md.
//
// The tests share one hub, which runs in this process; only TestTenantFillsTheMemory starts its own. A tenant is a
// ServiceAccount with all rights on Towline's kinds and on ConfigMaps of its namespace, and none on Secrets.
//
// The tests by subject:
//
//  1. The cloud identity of the hub: TestCloudIdentity.
//  2. Kubeconfigs in Secrets of members: TestKubeconfigOfAMember.
//  3. One tenant stops the hub: TestHostileContentOfATenant, TestEndlessMemberResponses, TestPushMembersThatStall,
//     TestTenantFillsTheMemory.
//  4. An agent drives the hub: TestAgentDrivesTheHub, TestKarmadaAgentDrivesTheHub, TestAgentDrivesItsRegistration.
//  5. Secrets in custom resources: TestSecretsInCustomResources, TestKeysOfOtherClusters, TestRolesOfUsers.
//  6. Registry credentials: TestRegistryCredentials, TestRegistryCredentialsRedirected.
//  7. Server-side request forgery: TestServerSideRequestForgery, TestResponsesAreNotRepeated, TestEndpointsOfClusters,
//     TestResponsesOfMembersAreNotRepeated.
//  8. Tenants: TestSummaryOfATenant, TestSummaryForAForeignCluster, TestSummaryWithTheUIDOfAProfile,
//     TestLabelsOfClusters, TestPatchesOfAgents, TestExistenceOfSecrets, TestAccountsOfProfiles,
//     TestProfileAsServiceAccount.
//  9. mgmt/mgmt: TestRegistrationOfTheHubCluster.
//  10. Tokens and certificates of agents: TestTokensOfAnAgent, TestTokensAfterThePolicyIsDeleted,
//     TestBootstrapTokenOfAnAttacker.
//  11. Checks: TestChecksBesideARollout.
//  12. Registrations: TestRegistrationThatHangs, TestPullModeOfAnEmptySpec.
//  13. Content that executes code: TestContentReachesNothing, TestExploitedSandbox,
//     TestExploitedSandboxOfAnotherTenant.
package attacks

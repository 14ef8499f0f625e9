package identity

import (
	"context"
	"fmt"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/policy"
	"github.com/Azure/azure-sdk-for-go/sdk/azidentity"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// azureScope is the scope of tokens for AKS: all clusters of AKS share this application.
const azureScope = "6dae42f8-4368-4678-94ff-3960e28e3630/.default"

func newAzure(w *libv1beta1.WorkloadIdentity, o Options) issuer {
	options := &azidentity.WorkloadIdentityCredentialOptions{
		TenantID: w.Azure.TenantID, ClientID: w.Azure.ClientID,
		// The operator of the hub configures the authority host, so it is not verified with Entra.
		DisableInstanceDiscovery: true,
	}
	if o.Client != nil {
		options.ClientOptions = azcore.ClientOptions{Transport: o.Client}
	}
	return func(ctx context.Context) (Token, error) {
		credential, err := azidentity.NewWorkloadIdentityCredential(options)
		if err != nil {
			return Token{}, fmt.Errorf("load the hub's credentials: %w", err)
		}
		issued, err := credential.GetToken(ctx, policy.TokenRequestOptions{Scopes: []string{azureScope}})
		if err != nil {
			return Token{}, err
		}
		return Token{Text: issued.Token, Expires: issued.ExpiresOn}, nil
	}
}

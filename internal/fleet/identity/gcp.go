package identity

import (
	"context"
	"fmt"

	"golang.org/x/oauth2"
	"golang.org/x/oauth2/google"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// gcpScope is the scope that GKE requires.
const gcpScope = "https://www.googleapis.com/auth/cloud-platform"

func newGCP(_ *libv1beta1.WorkloadIdentity, o Options) issuer {
	return func(ctx context.Context) (Token, error) {
		if o.Client != nil {
			ctx = context.WithValue(ctx, oauth2.HTTPClient, o.Client)
		}
		credentials, err := google.FindDefaultCredentials(ctx, gcpScope)
		if err != nil {
			return Token{}, fmt.Errorf("load the hub's credentials: %w", err)
		}
		issued, err := credentials.TokenSource.Token()
		if err != nil {
			return Token{}, err
		}
		return Token{Text: issued.AccessToken, Expires: issued.Expiry}, nil
	}
}

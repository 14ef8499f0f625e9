package identity

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"
	"github.com/aws/aws-sdk-go-v2/config"
	"github.com/aws/aws-sdk-go-v2/credentials/stscreds"
	"github.com/aws/aws-sdk-go-v2/service/sts"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// An EKS token is a presigned STS request GetCallerIdentity. EKS defines these values.
const (
	eksPrefix = "k8s-aws-v1."
	eksHeader = "x-k8s-aws-id"
	// eksPresignLifetime is the lifetime of the presigned request. EKS requires the value in the signature.
	eksPresignLifetime = time.Minute
	// eksTokenLifetime is the time for which EKS accepts a token, minus a minute for clocks that differ.
	eksTokenLifetime = 14 * time.Minute
	// emptyHash is the hexadecimal SHA-256 of the empty body.
	emptyHash = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
)

// roleSession is the session name of the hub in the logs of AWS when it assumes a role.
const roleSession = "towline"

// awsIssuer issues tokens of one EKS cluster.
type awsIssuer struct {
	cluster libv1beta1.AWSIdentity
	Options
}

func newAWS(w *libv1beta1.WorkloadIdentity, o Options) issuer {
	return (&awsIssuer{cluster: *w.AWS, Options: o}).issue
}

func (a *awsIssuer) issue(ctx context.Context) (Token, error) {
	hubConfig, err := a.loadConfig(ctx)
	if err != nil {
		return Token{}, err
	}
	credentials, err := hubConfig.Credentials.Retrieve(ctx)
	if err != nil {
		return Token{}, fmt.Errorf("read the hub's credentials: %w", err)
	}
	if a.cluster.RoleARN != "" {
		role := stscreds.NewAssumeRoleProvider(sts.NewFromConfig(hubConfig), a.cluster.RoleARN, func(o *stscreds.AssumeRoleOptions) {
			o.RoleSessionName = roleSession
		})
		if credentials, err = role.Retrieve(ctx); err != nil {
			return Token{}, fmt.Errorf("assume role %s: %w", a.cluster.RoleARN, err)
		}
	}
	return a.sign(ctx, credentials, hubConfig.Region)
}

// loadConfig loads the AWS configuration from the environment of the hub.
func (a *awsIssuer) loadConfig(ctx context.Context) (aws.Config, error) {
	var options []func(*config.LoadOptions) error
	if a.cluster.Region != "" {
		options = append(options, config.WithRegion(a.cluster.Region))
	}
	if a.Client != nil {
		options = append(options, config.WithHTTPClient(a.Client))
	}
	hubConfig, err := config.LoadDefaultConfig(ctx, options...)
	if err != nil {
		return hubConfig, fmt.Errorf("read the hub's environment: %w", err)
	}
	if hubConfig.Region == "" {
		return hubConfig, errors.New("no region: set spec.workloadIdentity.aws.region, or AWS_REGION in the hub's environment")
	}
	return hubConfig, nil
}

// sign returns a token: a request to STS that is signed with credentials.
func (a *awsIssuer) sign(ctx context.Context, credentials aws.Credentials, region string) (Token, error) {
	endpoint, err := sts.NewDefaultEndpointResolverV2().ResolveEndpoint(ctx, sts.EndpointParameters{Region: aws.String(region)})
	if err != nil {
		return Token{}, fmt.Errorf("resolve STS of region %s: %w", region, err)
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, endpoint.URI.JoinPath("/").String(), nil)
	if err != nil {
		return Token{}, fmt.Errorf("resolve STS of region %s: %w", region, err)
	}
	query := request.URL.Query()
	query.Set("Action", "GetCallerIdentity")
	query.Set("Version", "2011-06-15")
	query.Set("X-Amz-Expires", strconv.Itoa(int(eksPresignLifetime/time.Second)))
	request.URL.RawQuery = query.Encode()
	request.Header.Set(eksHeader, a.cluster.ClusterName)
	now := a.Clock.Now()
	signed, _, err := v4.NewSigner().PresignHTTP(ctx, credentials, request, emptyHash, "sts", region, now)
	if err != nil {
		return Token{}, fmt.Errorf("sign the token: %w", err)
	}
	expires := now.Add(eksTokenLifetime)
	if credentials.CanExpire && credentials.Expires.Before(expires) {
		expires = credentials.Expires
	}
	return Token{Text: eksPrefix + base64.RawURLEncoding.EncodeToString([]byte(signed)), Expires: expires}, nil
}

package identity_test

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"
	testclock "k8s.io/utils/clock/testing"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet/identity"
	"github.com/towline/towline/internal/localkube"
)

const (
	keyID  = "AKIDEXAMPLE"
	secret = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
)

// awsHub sets the environment of a hub with an AWS key, and returns a clock.
func awsHub(t *testing.T) *testclock.FakeClock {
	t.Helper()
	for name, value := range map[string]string{
		"AWS_ACCESS_KEY_ID": keyID, "AWS_SECRET_ACCESS_KEY": secret, "AWS_SESSION_TOKEN": "", "AWS_REGION": "eu-central-1", "AWS_DEFAULT_REGION": "",
		"AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null", "AWS_EC2_METADATA_DISABLED": "true", "AWS_PROFILE": "",
	} {
		t.Setenv(name, value)
	}
	return testclock.NewFakeClock(time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC))
}

func eks(cluster libv1beta1.AWSIdentity) *libv1beta1.WorkloadIdentity {
	return &libv1beta1.WorkloadIdentity{Provider: libv1beta1.WorkloadIdentityAWS, Endpoint: "https://127.0.0.1:1", AWS: &cluster}
}

// parseToken returns the request in a token.
func parseToken(t *testing.T, token string) *url.URL {
	t.Helper()
	text, ok := strings.CutPrefix(token, "k8s-aws-v1.")
	if !ok {
		t.Fatalf("token %q does not have the prefix of EKS", token)
	}
	raw, err := base64.RawURLEncoding.DecodeString(text)
	if err != nil {
		t.Fatal(err)
	}
	request, err := url.Parse(string(raw))
	if err != nil {
		t.Fatal(err)
	}
	return request
}

// signature computes the AWS signature, version 4, of a GET request with the key.
func signature(request *url.URL, cluster, region, key string) string {
	query := request.Query()
	query.Del("X-Amz-Signature")
	empty := sha256.Sum256(nil)
	canonical := strings.Join([]string{
		"GET", "/", strings.ReplaceAll(query.Encode(), "+", "%20"), "host:" + request.Host, "x-k8s-aws-id:" + cluster, "", "host;x-k8s-aws-id",
		hex.EncodeToString(empty[:]),
	}, "\n")
	at := query.Get("X-Amz-Date")
	hashed := sha256.Sum256([]byte(canonical))
	text := strings.Join([]string{"AWS4-HMAC-SHA256", at, at[:8] + "/" + region + "/sts/aws4_request", hex.EncodeToString(hashed[:])}, "\n")
	sum := []byte("AWS4" + key)
	for _, part := range []string{at[:8], region, "sts", "aws4_request", text} {
		mac := hmac.New(sha256.New, sum)
		mac.Write([]byte(part))
		sum = mac.Sum(nil)
	}
	return hex.EncodeToString(sum)
}

func TestEKSTokenIsAPresignedRequest(t *testing.T) {
	clock := awsHub(t)
	for name, test := range map[string]struct {
		region, wantRegion, wantHost string
	}{
		"region of the hub":   {"", "eu-central-1", "sts.eu-central-1.amazonaws.com"},
		"region of its own":   {"us-west-2", "us-west-2", "sts.us-west-2.amazonaws.com"},
		"another part of AWS": {"cn-north-1", "cn-north-1", "sts.cn-north-1.amazonaws.com.cn"},
	} {
		t.Run(name, func(t *testing.T) {
			source, err := identity.New(eks(libv1beta1.AWSIdentity{ClusterName: "prod", Region: test.region}), identity.Options{Clock: clock})
			if err != nil {
				t.Fatal(err)
			}
			token, err := source.Token(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			request := parseToken(t, token)
			want := url.Values{
				"Action": {"GetCallerIdentity"}, "Version": {"2011-06-15"}, "X-Amz-Algorithm": {"AWS4-HMAC-SHA256"},
				"X-Amz-Credential": {keyID + "/20260304/" + test.wantRegion + "/sts/aws4_request"}, "X-Amz-Date": {"20260304T050607Z"},
				"X-Amz-Expires": {"60"}, "X-Amz-SignedHeaders": {"host;x-k8s-aws-id"},
				"X-Amz-Signature": {signature(request, "prod", test.wantRegion, secret)},
			}
			if diff := cmp.Diff(want, request.Query()); diff != "" {
				t.Errorf("query (-want +got):\n%s", diff)
			}
			if request.Scheme != "https" || request.Host != test.wantHost || request.Path != "/" {
				t.Errorf("got %s, want https://%s/", request, test.wantHost)
			}
		})
	}
}

// eksProxy is an API server with an authenticator like EKS: it accepts tokens that were signed with the key for this
// cluster, and sends the requests to the plane as an account.
func eksProxy(t *testing.T, plane *localkube.Plane) *httptest.Server {
	t.Helper()
	host, err := url.Parse(plane.Config.Host)
	if err != nil {
		t.Fatal(err)
	}
	onPlane, err := rest.TransportFor(&rest.Config{TLSClientConfig: rest.TLSClientConfig{CAData: plane.Config.CAData}, BearerToken: accountToken(t, plane)})
	if err != nil {
		t.Fatal(err)
	}
	proxy := &httputil.ReverseProxy{Transport: onPlane, Rewrite: func(r *httputil.ProxyRequest) {
		r.SetURL(host)
		r.Out.Header.Del("Authorization")
	}}
	front := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		signed := parseToken(t, strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer "))
		if signed.Query().Get("X-Amz-Signature") != signature(signed, "prod", "eu-central-1", secret) {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		proxy.ServeHTTP(w, r)
	}))
	t.Cleanup(front.Close)
	return front
}

func TestEKSTokenReachesItsMemberOnly(t *testing.T) {
	awsHub(t)
	front := eksProxy(t, localkube.Shared(t))
	authority := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: front.Certificate().Raw})
	for cluster, allowed := range map[string]bool{"prod": true, "other": false} {
		source, err := identity.New(eks(libv1beta1.AWSIdentity{ClusterName: cluster}), identity.Options{})
		if err != nil {
			t.Fatal(err)
		}
		if err := requestVersion(t, front.URL, authority, source); (err == nil) != allowed || !allowed && !apierrors.IsUnauthorized(err) {
			t.Errorf("cluster %s: got error %v, want success: %t", cluster, err, allowed)
		}
	}
}

func TestEKSTokenIsRenewedBeforeItExpires(t *testing.T) {
	clock := awsHub(t)
	source, err := identity.New(eks(libv1beta1.AWSIdentity{ClusterName: "prod"}), identity.Options{Clock: clock})
	if err != nil {
		t.Fatal(err)
	}
	var last string
	for _, step := range []struct {
		after time.Duration
		fresh bool
	}{{0, true}, {10 * time.Minute, false}, {2 * time.Minute, true}, {20 * time.Minute, true}} {
		clock.Step(step.after)
		token, err := source.Token(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if fresh := token != last; fresh != step.fresh {
			t.Errorf("%s later: new token: got %t, want %t", step.after, fresh, step.fresh)
		}
		last = token
	}
}

func TestEKSTokenOfARole(t *testing.T) {
	clock := awsHub(t)
	answer := func(w http.ResponseWriter, r *http.Request) {
		if err := r.ParseForm(); err != nil || r.Form.Get("Action") != "AssumeRole" || r.Form.Get("RoleArn") != "arn:aws:iam::123456789012:role/hub" {
			w.WriteHeader(http.StatusForbidden)
			_, _ = fmt.Fprint(w, `<ErrorResponse><Error><Type>Sender</Type><Code>AccessDenied</Code><Message>not that role</Message></Error></ErrorResponse>`)
			return
		}
		_, _ = fmt.Fprintf(w, `<AssumeRoleResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleResult><Credentials><AccessKeyId>ASIAROLE</AccessKeyId>`+
			`<SecretAccessKey>role-secret</SecretAccessKey><SessionToken>role-session</SessionToken><Expiration>%s</Expiration></Credentials></AssumeRoleResult></AssumeRoleResponse>`,
			clock.Now().Add(time.Hour).Format(time.RFC3339))
	}
	server := httptest.NewServer(http.HandlerFunc(answer))
	t.Cleanup(server.Close)
	t.Setenv("AWS_ENDPOINT_URL_STS", server.URL)
	get := func(role string) (string, error) {
		source, err := identity.New(eks(libv1beta1.AWSIdentity{ClusterName: "prod", RoleARN: role}), identity.Options{Clock: clock})
		if err != nil {
			t.Fatal(err)
		}
		return source.Token(t.Context())
	}
	token, err := get("arn:aws:iam::123456789012:role/hub")
	if err != nil {
		t.Fatal(err)
	}
	query := parseToken(t, token).Query()
	if !strings.HasPrefix(query.Get("X-Amz-Credential"), "ASIAROLE/") || query.Get("X-Amz-Security-Token") != "role-session" ||
		query.Get("X-Amz-Signature") != signature(parseToken(t, token), "prod", "eu-central-1", "role-secret") {
		t.Errorf("token is signed as %v", query)
	}
	_, err = get("arn:aws:iam::123456789012:role/other")
	wantLine(t, err, "workload identity: get a token from AWS: assume role arn:aws:iam::123456789012:role/other: ", "AccessDenied: not that role")
}

func TestEKSWithMissingFields(t *testing.T) {
	awsHub(t)
	for name, test := range map[string]struct {
		cluster libv1beta1.AWSIdentity
		want    string
	}{
		"no cluster":     {libv1beta1.AWSIdentity{}, "spec.workloadIdentity.aws.clusterName is missing"},
		"no such region": {libv1beta1.AWSIdentity{ClusterName: "c", Region: "evil.example/#"}, `spec.workloadIdentity.aws.region: "evil.example/#" is not a region`},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := identity.New(eks(test.cluster), identity.Options{})
			wantLine(t, err, test.want)
		})
	}
	for name, want := range map[string]string{"AWS_REGION": "set spec.workloadIdentity.aws.region, or AWS_REGION", "AWS_ACCESS_KEY_ID": "read the hub's credentials: "} {
		t.Run("no "+name, func(t *testing.T) {
			t.Setenv(name, "")
			source, err := identity.New(eks(libv1beta1.AWSIdentity{ClusterName: "c"}), identity.Options{})
			if err != nil {
				t.Fatal(err)
			}
			_, err = source.Token(t.Context())
			wantLine(t, err, "workload identity: get a token from AWS: ", want)
		})
	}
}

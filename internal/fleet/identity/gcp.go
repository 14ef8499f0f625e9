package identity

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"slices"

	"golang.org/x/oauth2"
	"golang.org/x/oauth2/google"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
)

const (
	// gcpScope is the scope that GKE requires.
	gcpScope = "https://www.googleapis.com/auth/cloud-platform"
	// gkeAPI is the address of the API that manages GKE clusters, and gkeFields the fields of its response with endpoints.
	gkeAPI    = "https://container.googleapis.com/v1"
	gkeFields = "endpoint,privateClusterConfig(privateEndpoint,publicEndpoint)," +
		"controlPlaneEndpointsConfig(dnsEndpointConfig(endpoint),ipEndpointsConfig(privateEndpoint,publicEndpoint))"
)

// gcpIssuer issues tokens for one GKE cluster.
type gcpIssuer struct {
	cluster  libv1beta1.GCPIdentity
	endpoint string
	Options
}

func newGCP(w *libv1beta1.WorkloadIdentity, o Options) issuer {
	g := &gcpIssuer{endpoint: w.Endpoint, Options: o}
	if w.GCP != nil {
		g.cluster = *w.GCP
	}
	return g.issue
}

func (g *gcpIssuer) issue(ctx context.Context) (Token, error) {
	if g.Client != nil {
		ctx = context.WithValue(ctx, oauth2.HTTPClient, g.Client)
	}
	credentials, err := google.FindDefaultCredentials(ctx, gcpScope)
	if err != nil {
		return Token{}, fmt.Errorf("load the hub's credentials: %w", err)
	}
	issued, err := credentials.TokenSource.Token()
	if err != nil {
		return Token{}, err
	}
	if g.VerifyEndpoint {
		if err := g.verifyEndpoint(ctx, oauth2.NewClient(ctx, oauth2.StaticTokenSource(issued))); err != nil {
			return Token{}, err
		}
	}
	return Token{Text: issued.AccessToken, Expires: issued.Expiry}, nil
}

// gkeEndpoints are the endpoints of a cluster, as in the response of the GKE API.
type gkeEndpoints struct {
	Endpoint             string `json:"endpoint"`
	PrivateClusterConfig struct {
		PrivateEndpoint string `json:"privateEndpoint"`
		PublicEndpoint  string `json:"publicEndpoint"`
	} `json:"privateClusterConfig"`
	ControlPlaneEndpointsConfig struct {
		DNS struct {
			Endpoint string `json:"endpoint"`
		} `json:"dnsEndpointConfig"`
		IP struct {
			PrivateEndpoint string `json:"privateEndpoint"`
			PublicEndpoint  string `json:"publicEndpoint"`
		} `json:"ipEndpointsConfig"`
	} `json:"controlPlaneEndpointsConfig"`
}

// verifyEndpoint returns an error unless the GKE API lists the endpoint as a public endpoint of the cluster. In the
// network of the hub, the address of a private endpoint can belong to another server: with such a cluster, a user could
// get the token.
func (g *gcpIssuer) verifyEndpoint(ctx context.Context, authorized *http.Client) error {
	endpoint, err := fleet.ParseEndpoint(g.endpoint)
	if err != nil {
		return err
	}
	if address, err := netip.ParseAddr(endpoint.Hostname()); err == nil && !isPublic(address) {
		return fmt.Errorf("spec.workloadIdentity.endpoint: %s is not a public address, and not in the hub's --workload-identity-hosts", endpoint.Hostname())
	}
	if g.cluster.ProjectID == "" || g.cluster.Location == "" || g.cluster.ClusterName == "" {
		return errors.New("spec.workloadIdentity.gcp must have projectID, location and clusterName: the hub asks the GKE API for the endpoint of the cluster")
	}
	name := fmt.Sprintf("projects/%s/locations/%s/clusters/%s", url.PathEscape(g.cluster.ProjectID), url.PathEscape(g.cluster.Location), url.PathEscape(g.cluster.ClusterName))
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, gkeAPI+"/"+name+"?fields="+url.QueryEscape(gkeFields), nil)
	if err != nil {
		return fmt.Errorf("verify the endpoint: %w", err)
	}
	response, err := authorized.Do(request)
	if err != nil {
		return fmt.Errorf("verify the endpoint: %w", err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("verify the endpoint: the GKE API answered %s about %s: the identity needs the permission container.clusters.get", response.Status, name)
	}
	var found gkeEndpoints
	if err := json.NewDecoder(io.LimitReader(response.Body, maxBody)).Decode(&found); err != nil {
		return fmt.Errorf("verify the endpoint: decode the response of the GKE API: %w", err)
	}
	ip := found.ControlPlaneEndpointsConfig.IP
	public := []string{found.Endpoint, found.PrivateClusterConfig.PublicEndpoint, found.ControlPlaneEndpointsConfig.DNS.Endpoint, ip.PublicEndpoint}
	// found.Endpoint is the private endpoint if the cluster has no public one.
	private := []string{found.PrivateClusterConfig.PrivateEndpoint, ip.PrivateEndpoint}
	if host := endpoint.Hostname(); !slices.Contains(public, host) || slices.Contains(private, host) {
		return fmt.Errorf("spec.workloadIdentity.endpoint: %s is not a public endpoint of %s, and not in the hub's --workload-identity-hosts", host, name)
	}
	return nil
}

// isPublic returns whether an address is routed in the public internet.
func isPublic(address netip.Addr) bool {
	return !address.Is4In6() && address.IsGlobalUnicast() && !address.IsPrivate() &&
		!slices.ContainsFunc(reservedNetworks(), func(network netip.Prefix) bool { return network.Contains(address) })
}

// reservedNetworks returns the special-purpose networks of IANA that are not public, although netip regards their
// addresses as global unicast and not private. Networks of clouds use some of them.
func reservedNetworks() []netip.Prefix {
	var networks []netip.Prefix
	for _, text := range []string{
		"0.0.0.0/8", "100.64.0.0/10", "192.0.0.0/24", "192.0.2.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "240.0.0.0/4",
		"::/3", "4000::/2", "8000::/1", // all but 2000::/3
		"2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20",
	} {
		networks = append(networks, netip.MustParsePrefix(text))
	}
	return networks
}

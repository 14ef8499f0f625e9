package join

import (
	"bytes"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/url"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

const (
	// ManifestTokenLife is how long the token in a registration manifest lives unless AgentOptions say otherwise. The
	// agent exchanges it as soon as it starts, so this bounds the time between registering and applying the manifest.
	ManifestTokenLife = time.Hour
	// MinManifestTokenLife is the shortest life that Kubernetes gives a token.
	MinManifestTokenLife = 10 * time.Minute
)

// AgentOptions are what a cluster's manifest says of its agent beyond the defaults. They are kept, as JSON, in
// annotation kube.AnnotationAgentOptions of the SveltosCluster, which is why no secret may be among them.
type AgentOptions struct {
	// Image is the agent's container image.
	Image string `json:"image,omitempty"`
	// ImagePullSecrets are names of Secrets of namespace kube.AgentNamespace on the member.
	ImagePullSecrets []string `json:"imagePullSecrets,omitempty"`
	// ProxyURL is the http, https or socks5 proxy on the way to the hub, and on no other way.
	ProxyURL string `json:"proxyURL,omitempty"`
	// HubURL is the https address under which the agent reaches the hub.
	HubURL string `json:"hubURL,omitempty"`
	// HubCA are the certificates, in PEM, of the authorities that may vouch for HubURL.
	HubCA string `json:"hubCA,omitempty"`
	// Requests and Limits are quantities of cpu and memory for the agent's container.
	Requests map[string]string `json:"requests,omitempty"`
	Limits   map[string]string `json:"limits,omitempty"`
	// TokenLifetime is the life of the manifest's token, as a duration from MinManifestTokenLife to MaxTokenLife. Default:
	// ManifestTokenLife.
	TokenLifetime string `json:"tokenLifetime,omitempty"`
}

// ParseAgentOptions reads the content of annotation kube.AnnotationAgentOptions. Unknown fields are errors; an empty
// text has no options.
func ParseAgentOptions(text string) (AgentOptions, error) {
	var o AgentOptions
	if text == "" {
		return o, nil
	}
	decoder := json.NewDecoder(bytes.NewReader([]byte(text)))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&o); err != nil {
		return AgentOptions{}, fmt.Errorf("annotation %s: %w", kube.AnnotationAgentOptions, err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return AgentOptions{}, fmt.Errorf("annotation %s: it holds more than one JSON object", kube.AnnotationAgentOptions)
	}
	if err := o.Validate(); err != nil {
		return AgentOptions{}, fmt.Errorf("annotation %s: %w", kube.AnnotationAgentOptions, err)
	}
	return o, nil
}

// optionsOf reads the options that a SveltosCluster has.
func optionsOf(cluster *libv1beta1.SveltosCluster) (AgentOptions, error) {
	return ParseAgentOptions(cluster.Annotations[kube.AnnotationAgentOptions])
}

// Merge returns o with everything that over says laid over it. Another HubURL takes the old one's HubCA away.
func (o AgentOptions) Merge(over AgentOptions) AgentOptions {
	if over.HubURL != "" && over.HubURL != o.HubURL {
		o.HubCA = ""
	}
	for old, fresh := range map[*string]string{
		&o.Image: over.Image, &o.ProxyURL: over.ProxyURL, &o.HubURL: over.HubURL, &o.HubCA: over.HubCA, &o.TokenLifetime: over.TokenLifetime,
	} {
		if fresh != "" {
			*old = fresh
		}
	}
	if over.ImagePullSecrets != nil {
		o.ImagePullSecrets = slices.Clone(over.ImagePullSecrets)
	}
	o.Requests, o.Limits = mergeQuantities(o.Requests, over.Requests), mergeQuantities(o.Limits, over.Limits)
	return o
}

func mergeQuantities(old, over map[string]string) map[string]string {
	if len(old)+len(over) == 0 {
		return nil
	}
	merged := map[string]string{}
	maps.Copy(merged, old)
	maps.Copy(merged, over)
	return merged
}

// Encode returns o as the content of annotation kube.AnnotationAgentOptions; "" if o says nothing.
func (o AgentOptions) Encode() (string, error) {
	text, err := json.Marshal(o)
	if err != nil {
		return "", fmt.Errorf("encode the agent's options: %w", err)
	}
	if string(text) == "{}" {
		return "", nil
	}
	return string(text), nil
}

// Validate says what is wrong with o. The error names the field and the command-line flag that sets it.
func (o AgentOptions) Validate() error {
	if err := validateURL("hubURL (--management-cluster-url)", o.HubURL, "https"); err != nil {
		return err
	}
	if err := validateURL("proxyURL (--proxy-url)", o.ProxyURL, "http", "https", "socks5"); err != nil {
		return err
	}
	if err := validateCA(o.HubCA); err != nil {
		return err
	}
	for _, name := range o.ImagePullSecrets {
		if problems := validation.IsDNS1123Subdomain(name); len(problems) > 0 {
			return fmt.Errorf("imagePullSecrets (--image-pull-secret): %q is not the name of a Secret: %s", name, problems[0])
		}
	}
	if _, err := o.manifestTokenLife(); err != nil {
		return err
	}
	_, _, err := o.resources()
	return err
}

func validateURL(field, text string, schemes ...string) error {
	if text == "" {
		return nil
	}
	address, err := url.Parse(text)
	if err != nil || address.Host == "" || !slices.Contains(schemes, address.Scheme) {
		// The text may hold a password.
		return fmt.Errorf("%s is not an %s:// address", field, schemes[0])
	}
	if address.User != nil {
		return fmt.Errorf("%s holds a user name or password, which everybody who may read SveltosClusters could read", field)
	}
	return nil
}

func validateCA(text string) error {
	rest := []byte(text)
	for found := 0; len(bytes.TrimSpace(rest)) > 0; found++ {
		var block *pem.Block
		block, rest = pem.Decode(rest)
		if block == nil {
			if found > 0 {
				return nil // comments may follow the certificates
			}
			return errors.New("hubCA (--management-cluster-ca) holds no certificate in PEM")
		}
		if block.Type != "CERTIFICATE" {
			return fmt.Errorf("hubCA (--management-cluster-ca) holds a %s, and only certificates may be in it", block.Type)
		}
		if _, err := x509.ParseCertificate(block.Bytes); err != nil {
			return fmt.Errorf("hubCA (--management-cluster-ca): %w", err)
		}
	}
	return nil
}

// manifestTokenLife returns how long the manifest's token shall live.
func (o AgentOptions) manifestTokenLife() (time.Duration, error) {
	if o.TokenLifetime == "" {
		return ManifestTokenLife, nil
	}
	life, err := time.ParseDuration(o.TokenLifetime)
	if err != nil {
		return 0, fmt.Errorf("tokenLifetime (--token-lifetime): %w", err)
	}
	if life < MinManifestTokenLife || life > MaxTokenLife {
		return 0, fmt.Errorf("tokenLifetime (--token-lifetime): %s is not between %s and %s", life, MinManifestTokenLife, MaxTokenLife)
	}
	return life, nil
}

// resources returns the container's requests and limits. A default gives way to what o says of its counterpart.
func (o AgentOptions) resources() (requests, limits map[string]string, err error) {
	requests = map[string]string{"cpu": "200m", "memory": "512Mi"}
	limits = map[string]string{"cpu": "500m", "memory": "512Mi"}
	given := map[string]map[string]resource.Quantity{}
	for field, quantities := range map[string]map[string]string{"requests": o.Requests, "limits": o.Limits} {
		if given[field], err = parseQuantities(field, quantities); err != nil {
			return nil, nil, err
		}
	}
	for _, kind := range []string{"cpu", "memory"} {
		request, hasRequest := given["requests"][kind]
		limit, hasLimit := given["limits"][kind]
		if !hasRequest {
			request = resource.MustParse(requests[kind])
		}
		if !hasLimit {
			limit = resource.MustParse(limits[kind])
		}
		switch {
		case request.Cmp(limit) <= 0:
		case hasRequest && hasLimit:
			return nil, nil, fmt.Errorf("requests: %s of %s is more than the limit of %s", request.String(), kind, limit.String())
		case hasRequest:
			limit = request
		default:
			request = limit
		}
		requests[kind], limits[kind] = request.String(), limit.String()
	}
	return requests, limits, nil
}

func parseQuantities(field string, quantities map[string]string) (map[string]resource.Quantity, error) {
	parsed := map[string]resource.Quantity{}
	for _, kind := range slices.Sorted(maps.Keys(quantities)) {
		if kind != "cpu" && kind != "memory" {
			return nil, fmt.Errorf("%s (--agent-%s): %q is neither cpu nor memory", field, field, kind)
		}
		quantity, err := resource.ParseQuantity(quantities[kind])
		if err != nil || quantity.Sign() <= 0 {
			return nil, fmt.Errorf("%s (--agent-%s): %q is not a quantity of %s", field, field, quantities[kind], kind)
		}
		parsed[kind] = quantity
	}
	return parsed, nil
}

package join

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/url"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/util/cert"

	"github.com/towline/towline/internal/kube"
)

const (
	// ManifestTokenLife is the default life of the token in a manifest. The agent must connect before the token expires.
	ManifestTokenLife = time.Hour
	// MinManifestTokenLife is the shortest life of that token, which is the minimum of Kubernetes.
	MinManifestTokenLife = 10 * time.Minute
)

// AgentOptions are the options of one cluster's agent. Annotation kube.AnnotationAgentOptions of the SveltosCluster has
// them as JSON. All users who may read SveltosClusters see them, so no field may be secret. A zero value keeps the
// default.
type AgentOptions struct {
	// Image is the agent's container image.
	Image string `json:"image,omitempty"`
	// ImagePullSecrets are the names of existing Secrets in namespace kube.AgentNamespace on the member.
	ImagePullSecrets []string `json:"imagePullSecrets,omitempty"`
	// ProxyURL is the http, https or socks5 proxy for connections to the hub only.
	ProxyURL string `json:"proxyURL,omitempty"`
	// HubURL is the https URL of the hub for this agent.
	HubURL string `json:"hubURL,omitempty"`
	// HubCA are the CA certificates, in PEM, with which the agent verifies the hub's certificate.
	HubCA string `json:"hubCA,omitempty"`
	// Requests and Limits of the agent's container are Kubernetes quantities by resource: cpu and memory.
	Requests map[string]string `json:"requests,omitempty"`
	Limits   map[string]string `json:"limits,omitempty"`
	// TokenLifetime is the life of the manifest's token, in the format of time.ParseDuration, from MinManifestTokenLife to
	// MaxTokenLife. Default: ManifestTokenLife.
	TokenLifetime string `json:"tokenLifetime,omitempty"`
}

// ParseAgentOptions parses and validates the value of annotation kube.AnnotationAgentOptions; "" has no options. It
// returns an error for an unknown field.
func ParseAgentOptions(text string) (AgentOptions, error) {
	var o AgentOptions
	if text == "" {
		return o, nil
	}
	decoder := json.NewDecoder(strings.NewReader(text))
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

// Merge returns o with the fields that are set in over. A new HubURL clears HubCA, unless over has a HubCA.
// ImagePullSecrets are replaced as a whole, Requests and Limits per resource.
func (o AgentOptions) Merge(over AgentOptions) (AgentOptions, error) {
	if over.HubURL != "" && over.HubURL != o.HubURL {
		o.HubCA = ""
	}
	if over.ImagePullSecrets != nil {
		o.ImagePullSecrets = nil // an empty list of over is not in its JSON
	}
	text, err := over.Encode()
	if err != nil || text == "" {
		return o, err
	}
	// Unmarshal writes into the existing maps, and keeps fields and keys that text does not have.
	o.Requests, o.Limits = maps.Clone(o.Requests), maps.Clone(o.Limits)
	err = json.Unmarshal([]byte(text), &o)
	return o, err
}

// Encode returns o as the value of annotation kube.AnnotationAgentOptions, "" if no field is set.
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

// Validate returns an error for an invalid field. The error names the field and its command-line flag.
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
	if life, err := time.ParseDuration(cmp.Or(o.TokenLifetime, ManifestTokenLife.String())); err != nil {
		return fmt.Errorf("tokenLifetime (--token-lifetime): %w", err)
	} else if life < MinManifestTokenLife || life > MaxTokenLife {
		return fmt.Errorf("tokenLifetime (--token-lifetime): %s is not between %s and %s", life, MinManifestTokenLife, MaxTokenLife)
	}
	_, _, err := o.resources()
	return err
}

// validateURL returns an error unless text is empty or a URL with one of the schemes and without a user or password.
func validateURL(field, text string, schemes ...string) error {
	if text == "" {
		return nil
	}
	address, err := url.Parse(text)
	if err != nil || address.Host == "" || !slices.Contains(schemes, address.Scheme) {
		// The error does not quote the text, because it may contain a password.
		return fmt.Errorf("%s is not an %s:// address", field, schemes[0])
	}
	if address.User != nil {
		return fmt.Errorf("%s holds a user name or password, which everybody who may read SveltosClusters could read", field)
	}
	return nil
}

// validateCA returns an error unless text is empty, or has certificates in PEM and no private key.
func validateCA(text string) error {
	if text == "" {
		return nil
	}
	if _, err := cert.ParseCertsPEM([]byte(text)); err != nil {
		return fmt.Errorf("hubCA (--management-cluster-ca) holds no certificate in PEM: %w", err)
	}
	if strings.Contains(text, "PRIVATE KEY") {
		return errors.New("hubCA (--management-cluster-ca) holds a PRIVATE KEY, and only certificates may be in it")
	}
	return nil
}

// manifestTokenLife returns the life of the manifest's token. The options must be valid.
func (o AgentOptions) manifestTokenLife() time.Duration {
	if life, err := time.ParseDuration(o.TokenLifetime); err == nil {
		return life
	}
	return ManifestTokenLife
}

// resources returns the container's requests and limits. If only one of a request and its limit is given, and the
// default of the other does not fit, the other gets the same value. It returns an error if a given request is greater
// than the given limit.
func (o AgentOptions) resources() (requests, limits map[string]string, err error) {
	requests = map[string]string{"cpu": "200m", "memory": "512Mi"}
	limits = map[string]string{"cpu": "500m", "memory": "512Mi"}
	parsed := map[string]map[string]resource.Quantity{}
	for field, quantities := range map[string]map[string]string{"requests": o.Requests, "limits": o.Limits} {
		if parsed[field], err = parseQuantities(field, quantities); err != nil {
			return nil, nil, err
		}
	}
	for _, kind := range []string{"cpu", "memory"} {
		request, hasRequest := parsed["requests"][kind]
		limit, hasLimit := parsed["limits"][kind]
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

// parseQuantities parses requests or limits, which must be positive quantities of cpu and memory.
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

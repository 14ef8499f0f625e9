package fleet

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/kube"
)

// Facts are the version and the APIs of a cluster.
type Facts struct {
	// Version is the gitVersion.
	Version string
	// APIVersions are the served APIs, as "group/version" and "group/version/Kind", sorted.
	APIVersions []string
	// Complete is false if APIVersions lacks an aggregated API that did not answer.
	Complete bool
}

// maxVersion and MaxAPIVersions limit the facts, as the fields in the status of a SveltosCluster are limited: a hostile
// cluster must not fill the memory of the hub.
const (
	maxVersion = 256
	// MaxAPIVersions is the maximum number of Facts.APIVersions.
	MaxAPIVersions = 20_000
	// maxDiscovery and maxDiscoveryValues limit all responses of one probe together, in bytes and JSON values. An API
	// takes about 300 bytes and 35 values.
	maxDiscovery       = 16 << 20
	maxDiscoveryValues = 800_000
)

// errTooManyAPIs is the error of a cluster whose responses are longer than that.
var errTooManyAPIs = fmt.Errorf("read the APIs: the cluster returned more than %d MiB or %d values", maxDiscovery>>20, maxDiscoveryValues)

// Probe reads the version and the APIs of the cluster behind cfg. It fails if the cluster is unreachable or denies
// access, or if ctx ends.
func Probe(ctx context.Context, cfg *rest.Config) (Facts, error) {
	cfg = rest.CopyConfig(cfg)
	// The discovery client takes no context, so the end of ctx reaches it as a timeout.
	if end, ok := ctx.Deadline(); ok {
		cfg.Timeout = max(time.Until(end), time.Millisecond)
	}
	budget := kube.NewBudget(maxDiscovery, maxDiscoveryValues, errTooManyAPIs)
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper { return budgetTransport{next, budget} })
	member, err := discovery.NewDiscoveryClientForConfig(cfg)
	if err != nil {
		return Facts{}, fmt.Errorf("create a client: %w", err)
	}
	version, err := member.ServerVersion()
	if err != nil {
		return Facts{}, fmt.Errorf("read the version: %w", err)
	}
	if len(version.GitVersion) > maxVersion {
		return Facts{}, fmt.Errorf("read the version: it has more than %d bytes", maxVersion)
	}
	facts := Facts{Version: version.GitVersion, Complete: true}
	_, resources, err := member.ServerGroupsAndResources()
	if budget.Err() != nil {
		return Facts{}, budget.Err()
	}
	if err != nil {
		if !discovery.IsGroupDiscoveryFailedError(err) {
			return Facts{}, fmt.Errorf("read the APIs: %w", err)
		}
		facts.Complete = false
	}
	facts.APIVersions = apiVersions(resources)
	if len(facts.APIVersions) > MaxAPIVersions {
		return Facts{}, fmt.Errorf("read the APIs: the cluster serves more than %d", MaxAPIVersions)
	}
	return facts, nil
}

// budgetTransport limits the bodies of all responses together.
type budgetTransport struct {
	http.RoundTripper

	budget *kube.Budget
}

// RoundTrip implements http.RoundTripper.
func (t budgetTransport) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := t.RoundTripper.RoundTrip(request)
	if err == nil {
		response.Body = t.budget.Limit(response.Body)
	}
	return response, err
}

func apiVersions(lists []*metav1.APIResourceList) []string {
	var served []string
	for _, list := range lists {
		served = append(served, list.GroupVersion)
		for _, resource := range list.APIResources {
			if !strings.Contains(resource.Name, "/") {
				served = append(served, list.GroupVersion+"/"+resource.Kind)
			}
		}
	}
	slices.Sort(served)
	return slices.Compact(served)
}

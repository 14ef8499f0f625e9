package fleet

import (
	"context"
	"fmt"
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
	// APIVersions are the served APIs, as "group/version" and "group/version/Kind", sorted. Probe fails if there are more
	// than kube.MaxAPIs, or if their names have more than kube.MaxAPIText bytes.
	APIVersions []string
	// Complete is false if APIVersions lacks an aggregated API that did not answer.
	Complete bool
}

// maxVersion is the maximum length of a version in bytes, as in the status of a SveltosCluster.
const maxVersion = 256

// Probe reads the version and the APIs of the cluster behind cfg. It fails if the cluster is unreachable or denies
// access. The deadline of ctx limits each request. The cancellation of ctx has no effect.
func Probe(ctx context.Context, cfg *rest.Config) (Facts, error) {
	cfg = rest.CopyConfig(cfg)
	// The discovery client takes no context, so the deadline of ctx becomes the timeout of each request.
	if end, ok := ctx.Deadline(); ok {
		cfg.Timeout = max(time.Until(end), time.Millisecond)
	}
	httpClient, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return Facts{}, fmt.Errorf("create a client: %w", err)
	}
	discoveryClient, err := kube.NewDiscovery(cfg, httpClient)
	if err != nil {
		return Facts{}, fmt.Errorf("create a client: %w", err)
	}
	version, err := discoveryClient.ServerVersion()
	if err != nil {
		return Facts{}, fmt.Errorf("read the version: %w", err)
	}
	if len(version.GitVersion) > maxVersion {
		return Facts{}, fmt.Errorf("read the version: it has more than %d bytes", maxVersion)
	}
	facts := Facts{Version: version.GitVersion, Complete: true}
	_, resources, err := discoveryClient.ServerGroupsAndResources()
	if err != nil {
		if !discovery.IsGroupDiscoveryFailedError(err) {
			return Facts{}, fmt.Errorf("read the APIs: %w", err)
		}
		facts.Complete = false
	}
	facts.APIVersions = apiVersions(resources)
	return facts, nil
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

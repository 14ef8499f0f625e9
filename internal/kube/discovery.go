package kube

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"
)

const (
	// MaxAPIs is the maximum number of API versions and resources of a cluster together.
	MaxAPIs = 20_000
	// MaxAPIText is the maximum number of bytes in their names, with the name of the API version for each resource. 5,000
	// resources have about 350 KiB.
	MaxAPIText = 1 << 20
	// maxDiscovery and maxDiscoveryValues limit all responses of one discovery together, in bytes and JSON values. An API
	// takes about 300 bytes and 35 values.
	maxDiscovery       = 16 << 20
	maxDiscoveryValues = 800_000
	// maxSeparateVersions is the maximum number of API versions of an API server without aggregated discovery, as before
	// Kubernetes 1.27: client-go starts a goroutine and sends a request for each of them.
	maxSeparateVersions = 1000
	// maxConcurrent is the maximum number of concurrent requests, each of which can need a connection.
	maxConcurrent = 20
	// discoveryTries is the maximum number of attempts if some API versions fail: a group may be deleted during a
	// discovery.
	discoveryTries = 2
)

// The maximum lengths of names in Kubernetes, in bytes. Names of resources have at most 63, except names of external
// metrics, which are served as resources.
const (
	maxGroupName    = 253
	maxVersionName  = 63
	maxKindName     = 63
	maxResourceName = 253
)

var (
	errLongDiscovery   = fmt.Errorf("the cluster returned more than %d MiB or %d values", maxDiscovery>>20, maxDiscoveryValues)
	errTooManyAPIs     = fmt.Errorf("the cluster serves more than %d API versions and resources, or their names have more than %d MiB", MaxAPIs, MaxAPIText>>20)
	errTooManyVersions = fmt.Errorf("the cluster serves more than %d API versions without aggregated discovery", maxSeparateVersions)
)

// Discovery is a discovery client for a cluster that may be hostile. It limits the memory of the responses: of all
// responses of ServerGroupsAndResources or ServerPreferredResources together, and of each one otherwise.
type Discovery struct {
	limitedClient

	config *rest.Config
	// httpClient sends the requests.
	httpClient *http.Client
}

// NewDiscovery returns a Discovery for the cluster of config, which sends its requests with httpClient.
func NewDiscovery(config *rest.Config, httpClient *http.Client) (*Discovery, error) {
	perResponse, err := newLimitedClient(config, httpClient, newDiscoveryBudget)
	if err != nil {
		return nil, err
	}
	return &Discovery{limitedClient: perResponse, config: config, httpClient: httpClient}, nil
}

// ServerGroupsAndResources returns the groups and resources of the cluster, without subresources. If some API versions
// fail, it returns the other ones and a discovery.ErrGroupDiscoveryFailed. It omits names that Kubernetes does not
// allow. It fails if there are more than MaxAPIs, or more than MaxAPIText in their names.
func (d *Discovery) ServerGroupsAndResources() (groups []*metav1.APIGroup, lists []*metav1.APIResourceList, err error) {
	lists, err = d.readLimited(func(client discovery.DiscoveryInterface) (lists []*metav1.APIResourceList, err error) {
		groups, lists, err = discovery.ServerGroupsAndResources(client)
		return lists, err
	})
	return groups, lists, err
}

// ServerPreferredResources returns each resource of the cluster in its preferred version. It has the limits and the
// errors of ServerGroupsAndResources.
func (d *Discovery) ServerPreferredResources() ([]*metav1.APIResourceList, error) {
	return d.readLimited(discovery.ServerPreferredResources)
}

// readLimited calls read with a client that limits all responses together. It limits the result, too.
func (d *Discovery) readLimited(read func(discovery.DiscoveryInterface) ([]*metav1.APIResourceList, error)) ([]*metav1.APIResourceList, error) {
	var budget *Budget
	client, err := newLimitedClient(d.config, d.httpClient, func() *Budget { return budget })
	if err != nil {
		return nil, err
	}
	var lists []*metav1.APIResourceList
	for range discoveryTries {
		budget = newDiscoveryBudget()
		lists, err = read(client)
		if budget.Err() != nil {
			return nil, budget.Err() // client-go can return it as the failure of some API versions
		}
		if !discovery.IsGroupDiscoveryFailedError(err) {
			break
		}
	}
	if lists = removeInvalidNames(lists); exceedLimits(lists) {
		return nil, errTooManyAPIs
	}
	return lists, err
}

var _ discovery.AggregatedDiscoveryInterface = limitedClient{}

// limitedClient is a discovery client that limits its responses and the number of its concurrent requests.
type limitedClient struct{ *discovery.DiscoveryClient }

// newLimitedClient returns a client that limits each response by the budget that newBudget returns.
func newLimitedClient(config *rest.Config, httpClient *http.Client, newBudget func() *Budget) (limitedClient, error) {
	limited := *httpClient
	if limited.Transport == nil {
		limited.Transport = http.DefaultTransport
	}
	limited.Transport = budgetTransport{limited.Transport, newBudget, make(chan struct{}, maxConcurrent)}
	discoveryClient, err := discovery.NewDiscoveryClientForConfigAndClient(config, &limited)
	return limitedClient{discoveryClient}, err
}

func newDiscoveryBudget() *Budget {
	return NewBudget(maxDiscovery, maxDiscoveryValues, errLongDiscovery)
}

// GroupsAndMaybeResources implements discovery.AggregatedDiscoveryInterface. If it returns no resources, the caller
// reads all API versions at the same time, with a request for each. The functions of package discovery call it; the
// methods of DiscoveryClient do not.
func (c limitedClient) GroupsAndMaybeResources() (
	groups *metav1.APIGroupList, resources map[schema.GroupVersion]*metav1.APIResourceList, failed map[schema.GroupVersion]error, err error,
) {
	groups, resources, failed, err = c.DiscoveryClient.GroupsAndMaybeResources()
	if err != nil || len(resources) > 0 {
		return groups, resources, failed, err
	}
	versions := 0
	for _, group := range groups.Groups {
		versions += len(group.Versions)
	}
	if versions > maxSeparateVersions {
		return nil, nil, nil, errTooManyVersions
	}
	return groups, resources, failed, nil
}

// removeInvalidNames removes API versions and resources with names that Kubernetes does not allow. That removes
// subresources, too: their names have a slash.
func removeInvalidNames(lists []*metav1.APIResourceList) []*metav1.APIResourceList {
	for _, list := range lists {
		list.APIResources = slices.DeleteFunc(list.APIResources, func(resource metav1.APIResource) bool {
			return !isAPIName(resource.Name, maxResourceName) || !isAPIName(resource.Kind, maxKindName)
		})
	}
	return slices.DeleteFunc(lists, func(list *metav1.APIResourceList) bool {
		gv, err := schema.ParseGroupVersion(list.GroupVersion)
		return err != nil || gv.Group != "" && !isAPIName(gv.Group, maxGroupName) || !isAPIName(gv.Version, maxVersionName)
	})
}

// isAPIName returns whether name is valid for a group, version, kind or resource with at most limit bytes. Such a name
// has no escapes in JSON.
func isAPIName(name string, limit int) bool {
	return name != "" && len(name) <= limit && !strings.ContainsFunc(name, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("-._:", r)
	})
}

// exceedLimits returns whether lists have more than MaxAPIs or MaxAPIText.
func exceedLimits(lists []*metav1.APIResourceList) bool {
	count, text := len(lists), 0
	for _, list := range lists {
		count += len(list.APIResources)
		text += len(list.GroupVersion)
		for _, resource := range list.APIResources {
			text += len(list.GroupVersion) + len("/") + len(resource.Kind) + len(resource.Name)
		}
	}
	return count > MaxAPIs || text > MaxAPIText
}

// budgetTransport limits each response by the budget that newBudget returns, and the number of concurrent requests.
type budgetTransport struct {
	http.RoundTripper

	newBudget func() *Budget
	// running has an element for each request whose response is not closed.
	running chan struct{}
}

// RoundTrip implements http.RoundTripper.
func (t budgetTransport) RoundTrip(request *http.Request) (*http.Response, error) {
	select {
	case t.running <- struct{}{}:
	case <-request.Context().Done():
		return nil, request.Context().Err()
	}
	release := sync.OnceFunc(func() { <-t.running })
	budget := t.newBudget()
	if err := budget.Err(); err != nil {
		release()
		return nil, err
	}
	response, err := t.RoundTripper.RoundTrip(request)
	if err != nil {
		release()
		return response, err
	}
	response.Body = closingBody{budget.Limit(response.Body), release}
	return response, nil
}

// closingBody is the body of a response that calls release when it is closed.
type closingBody struct {
	io.ReadCloser

	release func()
}

// Close closes the body.
func (b closingBody) Close() error {
	defer b.release()
	return b.ReadCloser.Close()
}

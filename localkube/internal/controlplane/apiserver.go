package controlplane

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
	utilerrors "k8s.io/apimachinery/pkg/util/errors"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/client-go/rest"
	aggregator "k8s.io/kube-aggregator/pkg/apiserver"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
	"k8s.io/kubernetes/cmd/kube-apiserver/app/options"
)

// issuer is the "iss" claim of every ServiceAccount token.
const issuer = "https://kubernetes.default.svc.cluster.local"

// newAPIServer builds an API server that stores in the etcd at etcdSocket, will serve on listener and tells others to come to advertise.
func newAPIServer(ctx context.Context, listener net.Listener, advertise net.IP, certs pki) (*aggregator.APIAggregator, error) {
	opts := options.NewServerRunOptions()
	flags := pflag.NewFlagSet("kube-apiserver", pflag.ContinueOnError)
	for _, set := range opts.Flags().FlagSets {
		flags.AddFlagSet(set)
	}
	if err := flags.Parse(apiServerFlags(listener, advertise, certs)); err != nil {
		return nil, fmt.Errorf("parse API server flags: %w", err)
	}
	opts.SecureServing.Listener = listener
	if err := opts.GenericServerRunOptions.ComponentGlobalsRegistry.Set(); err != nil {
		return nil, fmt.Errorf("set feature gates: %w", err)
	}
	rest.SetDefaultWarningHandler(rest.NoWarnings{})
	completed, err := opts.Complete(ctx)
	if err != nil {
		return nil, fmt.Errorf("complete API server options: %w", err)
	}
	if errs := completed.Validate(); len(errs) > 0 {
		return nil, fmt.Errorf("validate API server options: %w", utilerrors.NewAggregate(errs))
	}
	config, err := app.NewConfig(completed)
	if err != nil {
		return nil, fmt.Errorf("configure API server: %w", err)
	}
	// Clients of today read OpenAPI v3. Without v2 a start takes a fifth less of the processor.
	config.KubeAPIs.ControlPlane.Generic.OpenAPIConfig = nil
	config.Aggregator.GenericConfig.OpenAPIConfig = nil
	config.KubeAPIs.ControlPlane.Generic.SkipOpenAPIInstallation = true // see openAPI
	done, err := config.Complete()
	if err != nil {
		return nil, fmt.Errorf("complete API server configuration: %w", err)
	}
	server, err := app.CreateServerChain(done)
	if err != nil {
		return nil, fmt.Errorf("build API server: %w", err)
	}
	// The aggregator is the first of three servers, the last one serves custom resources.
	builtIn, ok := server.GenericAPIServer.NextDelegate().(*genericapiserver.GenericAPIServer)
	if !ok {
		return nil, fmt.Errorf("the API server delegates to a %T", server.GenericAPIServer.NextDelegate())
	}
	installOpenAPI(builtIn, config.KubeAPIs.ControlPlane.Generic.OpenAPIV3Config)
	return server, nil
}

func apiServerFlags(listener net.Listener, advertise net.IP, certs pki) []string {
	return []string{
		"--etcd-servers=unix://" + etcdSocket,
		"--bind-address=" + listener.Addr().(*net.TCPAddr).IP.String(),
		"--advertise-address=" + advertise.String(),
		"--secure-port=" + strconv.Itoa(port(listener)),
		"--endpoint-reconciler-type=none",
		"--service-cluster-ip-range=" + serviceRange,
		"--allow-privileged=true",
		"--authorization-mode=Node,RBAC",
		"--enable-bootstrap-token-auth=true",
		"--enable-admission-plugins=NodeRestriction",
		"--disable-admission-plugins=MutatingAdmissionPolicy", // it reads the OpenAPI document every 5 s
		"--tls-cert-file=" + certs.crt("apiserver"),
		"--tls-private-key-file=" + certs.key("apiserver"),
		"--client-ca-file=" + certs.crt("ca"),
		"--requestheader-client-ca-file=" + certs.crt("front-proxy-ca"),
		"--requestheader-allowed-names=front-proxy-client",
		"--requestheader-username-headers=X-Remote-User",
		"--requestheader-group-headers=X-Remote-Group",
		"--requestheader-extra-headers-prefix=X-Remote-Extra-",
		"--proxy-client-cert-file=" + certs.crt("front-proxy"),
		"--proxy-client-key-file=" + certs.key("front-proxy"),
		"--service-account-issuer=" + issuer,
		"--service-account-key-file=" + certs.key("sa"),
		"--service-account-signing-key-file=" + certs.key("sa"),
		"--cert-dir=" + filepath.Join(certs.dir, "unused"),
		"--profiling=false",
		"--watch-cache-sizes=" + strings.Join(withoutWatchCache(), ","),
		// Both write Leases every 10 s, for API servers that share an etcd.
		"--feature-gates=APIServerIdentity=false,UnknownVersionInteroperabilityProxy=false",
		// Metrics that nobody reads here.
		"--etcd-count-metric-poll-period=0",
		"--etcd-db-metric-poll-interval=0",
	}
}

// withoutWatchCache returns the kinds without a watch cache, as values of --watch-cache-sizes: those that tests hardly
// use. Each cache has a timer of a second. Watches of these kinds read etcd.
func withoutWatchCache() []string {
	var sizes []string
	for group, resources := range map[string][]string{
		"":                              {"limitranges", "persistentvolumes", "podtemplates", "replicationcontrollers", "resourcequotas"},
		".admissionregistration.k8s.io": {"mutatingadmissionpolicies", "mutatingadmissionpolicybindings"},
		".autoscaling":                  {"horizontalpodautoscalers"},
		".batch":                        {"cronjobs"},
		".flowcontrol.apiserver.k8s.io": {"flowschemas", "prioritylevelconfigurations"},
		".networking.k8s.io":            {"ingressclasses", "ingresses", "ipaddresses", "networkpolicies", "servicecidrs"},
		".node.k8s.io":                  {"runtimeclasses"},
		".policy":                       {"poddisruptionbudgets"},
		".resource.k8s.io":              {"deviceclasses", "resourceclaims", "resourceclaimtemplates", "resourceslices"},
		".scheduling.k8s.io":            {"priorityclasses"},
		".storage.k8s.io": {
			"csidrivers", "csinodes", "csistoragecapacities", "storageclasses", "volumeattachments", "volumeattributesclasses",
		},
	} {
		for _, resource := range resources {
			sizes = append(sizes, resource+group+"#0")
		}
	}
	return sizes
}

func port(listener net.Listener) int { return listener.Addr().(*net.TCPAddr).Port }

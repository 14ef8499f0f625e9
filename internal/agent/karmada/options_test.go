package karmada

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/spf13/pflag"
	"k8s.io/client-go/rest"
)

func TestFlagsAndDefaults(t *testing.T) {
	t.Parallel()
	o := Options{}
	flags := pflag.NewFlagSet("agent", pflag.ContinueOnError)
	o.AddFlags(flags)
	for name, want := range map[string]string{
		"cluster-namespace": "karmada-cluster", "controllers": "[*]", "leader-elect": "true", "leader-elect-resource-namespace": "karmada-system",
		"leader-elect-lease-duration": "15s", "leader-elect-renew-deadline": "10s", "leader-elect-retry-period": "2s",
		"cluster-status-update-frequency": "10s", "cluster-lease-duration": "40s", "cluster-lease-renew-interval-fraction": "0.25",
		"cluster-success-threshold": "30s", "cluster-failure-threshold": "30s", "cluster-api-qps": "40", "cluster-api-burst": "60",
		"kube-api-qps": "40", "kube-api-burst": "60", "concurrent-work-syncs": "5", "resync-period": "0s", "enable-cluster-resource-modeling": "true",
		"metrics-bind-address": ":8080", "health-probe-bind-address": ":10357", "rate-limiter-base-delay": "5ms", "rate-limiter-max-delay": "16m40s",
		"rate-limiter-qps": "10", "rate-limiter-bucket-size": "100",
		"cert-rotation-checking-interval": "5m0s", "cert-rotation-remaining-time-threshold": "0.2",
		"karmada-kubeconfig": "", "karmada-context": "", "karmada-kubeconfig-secret": "", "kubeconfig": "", "context": "", "cluster-name": "",
		"cluster-api-endpoint": "", "proxy-server-address": "", "cluster-provider": "", "cluster-region": "", "cluster-zones": "[]",
	} {
		flag := flags.Lookup(name)
		if flag == nil {
			t.Errorf("--%s: no such flag", name)
		} else if flag.DefValue != want {
			t.Errorf("--%s: default is %s, want %s", name, flag.DefValue, want)
		}
	}
	if diff := cmp.Diff(Defaults(), o, cmpopts.IgnoreUnexported(Options{})); diff != "" {
		t.Errorf("defaults (-want +got):\n%s", diff)
	}
}

func TestInvalidOptions(t *testing.T) {
	t.Parallel()
	good := func() Options {
		o := Defaults()
		o.Cluster, o.HubSecret, o.Member = "c", "karmada-system/karmada-kubeconfig", &rest.Config{}
		return o
	}
	if _, err := good().complete(); err != nil {
		t.Errorf("good options: %v", err)
	}
	for want, change := range map[string]func(*Options){
		"--cluster-name":              func(o *Options) { o.Cluster = "" },
		"--karmada-kubeconfig-secret": func(o *Options) { o.HubSecret = "" },
		"<namespace>/<name>":          func(o *Options) { o.HubSecret = "x" },
		"is required":                 func(o *Options) { o.HubKubeconfig = "file" },
		"--karmada-context":           func(o *Options) { o.HubContext = "hub" },
		"--kubeconfig":                func(o *Options) { o.Member = nil },
		"between 0 and 1":             func(o *Options) { o.RotationThreshold = 1 },
		"--controllers":               func(o *Options) { o.Controllers = []string{"*", "-serviceExport"} },
		"above zero":                  func(o *Options) { o.WorkSyncs = 0 },
	} {
		o := good()
		change(&o)
		if _, err := o.complete(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("want an error about %q, got %v", want, err)
		}
	}
}

func TestControllers(t *testing.T) {
	t.Parallel()
	for text, want := range map[string][4]bool{
		"*":                        {true, true, true, true},
		"*,certRotation":           {true, true, true, true},
		"*,-certRotation":          {true, true, true, false},
		"clusterStatus,workStatus": {true, false, true, false},
	} {
		o := Options{Controllers: strings.Split(text, ",")}
		var got [4]bool
		for i, name := range controllers() {
			got[i] = o.isEnabled(name)
		}
		if got != want {
			t.Errorf("%s: got %v, want %v", text, got, want)
		}
	}
}

package cli //nolint:testpackage // the functions are not exported

import (
	"strings"
	"testing"

	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// kubeconfig has contexts, each of a cluster with the part of its name behind a slash, or of its own name.
func kubeconfig(current string, contexts ...string) *clientcmdapi.Config {
	config := clientcmdapi.NewConfig()
	config.CurrentContext = current
	for _, context := range contexts {
		name, cluster, found := strings.Cut(context, "/")
		if !found {
			cluster = name
		}
		config.Contexts[name] = &clientcmdapi.Context{Cluster: cluster}
	}
	return config
}

func TestMemberContext(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		config            *clientcmdapi.Config
		explicit, cluster string
		want, wantError   string
	}{
		"explicit":               {kubeconfig("a", "a", "b", "c"), "c", "b", "c", ""},
		"named like the cluster": {kubeconfig("a", "a", "b"), "", "b", "b", ""},
		"current":                {kubeconfig("a", "a", "b"), "", "member1", "a", ""},
		"nothing":                {kubeconfig(""), "", "member1", "", ""},
		"explicit missing":       {kubeconfig("a", "a"), "c", "a", "", `no context "c"`},
		"explicit of nothing":    {kubeconfig(""), "c", "a", "", `no context "c"`},
		"no current":             {kubeconfig("", "a", "b"), "", "member1", "", `neither a context "member1" nor a current-context`},
		"current missing":        {kubeconfig("x", "a"), "", "member1", "", `current-context "x"`},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := memberContext(c.config, c.explicit, c.cluster)
			if got != c.want {
				t.Errorf("context: got %q, want %q", got, c.want)
			}
			wantText(t, err, c.wantError)
		})
	}
}

func TestDefaultClusterName(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		config          *clientcmdapi.Config
		want, wantError string
	}{
		"cluster of the current context": {kubeconfig("a", "a/member3", "member1"), "member3", ""},
		"not a name":                     {kubeconfig("a", "a/kind_x"), "", `invalid cluster name(kind_x)`},
		"too long":                       {kubeconfig("a", "a/"+strings.Repeat("x", 49)), "", "must be no more than 48 characters"},
		"no current context":             {kubeconfig("", "a"), "", "--cluster-name"},
		"current context missing":        {kubeconfig("b", "a"), "", `"b" is not among its contexts`},
		"no cluster":                     {kubeconfig("a", "a/"), "", "--cluster-name"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := defaultClusterName(c.config)
			if got != c.want {
				t.Errorf("name: got %q, want %q", got, c.want)
			}
			wantText(t, err, c.wantError)
		})
	}
}

// wantText wants an error with text in it, or none if text is empty.
func wantText(t *testing.T, err error, text string) {
	t.Helper()
	switch {
	case err == nil && text != "":
		t.Errorf("got no error, want one with %q", text)
	case err != nil && text == "":
		t.Errorf("got error %v, want none", err)
	case err != nil && !strings.Contains(err.Error(), text):
		t.Errorf("error: got %q, want one with %q", err, text)
	}
}

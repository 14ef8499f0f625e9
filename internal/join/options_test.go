package join_test

import (
	"encoding/pem"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/towline/towline/internal/join"
)

// certificate is one in PEM.
func certificate(t *testing.T) string {
	t.Helper()
	server := httptest.NewTLSServer(nil)
	defer server.Close()
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}))
}

func TestAgentOptionsAreChecked(t *testing.T) {
	t.Parallel()
	ca := certificate(t)
	for name, test := range map[string]struct {
		options join.AgentOptions
		want    string // empty: nothing is wrong
	}{
		"nothing":              {},
		"everything":           {options: join.AgentOptions{HubURL: "https://hub:6443", HubCA: ca, ProxyURL: "socks5://proxy:1080", TokenLifetime: "24h"}},
		"hub without TLS":      {join.AgentOptions{HubURL: "http://hub"}, "hubURL (--management-cluster-url) is not an https:// address"},
		"proxy with password":  {join.AgentOptions{ProxyURL: "http://u:secret@proxy"}, "proxyURL (--proxy-url) holds a user name or password"},
		"proxy of no scheme":   {join.AgentOptions{ProxyURL: "proxy:3128"}, "proxyURL (--proxy-url) is not an http:// address"},
		"no certificate":       {join.AgentOptions{HubCA: "x"}, "hubCA (--management-cluster-ca) holds no certificate"},
		"a key":                {join.AgentOptions{HubCA: ca + "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"}, "holds a PRIVATE KEY"},
		"pull secret":          {join.AgentOptions{ImagePullSecrets: []string{"A B"}}, `"A B" is not the name of a Secret`},
		"short life":           {join.AgentOptions{TokenLifetime: "9m59s"}, "tokenLifetime (--token-lifetime): 9m59s is not between 10m0s and 24h0m0s"},
		"long life":            {join.AgentOptions{TokenLifetime: "25h"}, "is not between"},
		"life of no duration":  {join.AgentOptions{TokenLifetime: "1 day"}, "tokenLifetime (--token-lifetime)"},
		"unknown resource":     {join.AgentOptions{Limits: map[string]string{"disk": "1Gi"}}, `limits (--agent-limits): "disk" is neither cpu nor memory`},
		"no quantity":          {join.AgentOptions{Requests: map[string]string{"cpu": "much"}}, `requests (--agent-requests): "much" is not a quantity of cpu`},
		"no resource":          {join.AgentOptions{Requests: map[string]string{"cpu": "0"}}, `"0" is not a quantity of cpu`},
		"more than the limit":  {join.AgentOptions{Requests: map[string]string{"cpu": "2"}, Limits: map[string]string{"cpu": "1"}}, "2 of cpu is more than the limit of 1"},
		"more than a default":  {options: join.AgentOptions{Requests: map[string]string{"cpu": "2"}}},
		"less than a default":  {options: join.AgentOptions{Limits: map[string]string{"memory": "256Mi"}}},
		"comment and two of a": {options: join.AgentOptions{HubCA: "# ours\n" + ca + ca}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			err := test.options.Validate()
			if test.want == "" {
				if err != nil {
					t.Errorf("got error %v, want none", err)
				}
				return
			}
			wantText(t, err, test.want)
			if strings.Contains(err.Error(), "secret@") {
				t.Errorf("the error tells the password: %v", err)
			}
		})
	}
}

func TestAgentOptionsAreMerged(t *testing.T) {
	t.Parallel()
	old := join.AgentOptions{Image: "a", HubURL: "https://one", HubCA: "ca", Limits: map[string]string{"cpu": "1", "memory": "1Gi"}}
	withList := old
	withList.ImagePullSecrets = []string{"a", "b"}
	for name, test := range map[string]struct{ old, over, want join.AgentOptions }{
		"nothing":         {old, join.AgentOptions{}, old},
		"one of a map":    {old, join.AgentOptions{Limits: map[string]string{"cpu": "2"}}, join.AgentOptions{Image: "a", HubURL: "https://one", HubCA: "ca", Limits: map[string]string{"cpu": "2", "memory": "1Gi"}}},
		"the same hub":    {old, join.AgentOptions{HubURL: "https://one"}, old},
		"another hub":     {old, join.AgentOptions{HubURL: "https://two"}, join.AgentOptions{Image: "a", HubURL: "https://two", Limits: old.Limits}},
		"another hub, CA": {old, join.AgentOptions{HubURL: "https://two", HubCA: "new"}, join.AgentOptions{Image: "a", HubURL: "https://two", HubCA: "new", Limits: old.Limits}},
		"a list":          {old, join.AgentOptions{ImagePullSecrets: []string{"b"}}, join.AgentOptions{Image: "a", HubURL: "https://one", HubCA: "ca", Limits: old.Limits, ImagePullSecrets: []string{"b"}}},
		"another list":    {withList, join.AgentOptions{ImagePullSecrets: []string{"c"}}, join.AgentOptions{Image: "a", HubURL: "https://one", HubCA: "ca", Limits: old.Limits, ImagePullSecrets: []string{"c"}}},
		"an empty list":   {withList, join.AgentOptions{ImagePullSecrets: []string{}}, old},
	} {
		got, err := test.old.Merge(test.over)
		if diff := cmp.Diff(test.want, got); err != nil || diff != "" {
			t.Errorf("%s: got error %v and (-want +got):\n%s", name, err, diff)
		}
	}
}

func TestAgentOptionsAreReadStrictly(t *testing.T) {
	t.Parallel()
	full := join.AgentOptions{Image: "a", ProxyURL: "http://proxy:3128", Requests: map[string]string{"cpu": "1"}, TokenLifetime: "10m"}
	text, err := full.Encode()
	if err != nil {
		t.Fatal(err)
	}
	got, err := join.ParseAgentOptions(text)
	if diff := cmp.Diff(full, got); err != nil || diff != "" {
		t.Errorf("got error %v and (-want +got):\n%s", err, diff)
	}
	if text, err := (join.AgentOptions{}).Encode(); text != "" || err != nil {
		t.Errorf("no options: got %q and error %v, want an empty text", text, err)
	}
	for text, want := range map[string]string{
		`{"imgae":"x"}`:           `annotation towline.dev/agent-options: json: unknown field "imgae"`,
		`{"image":1}`:             "annotation towline.dev/agent-options: json",
		`{}{}`:                    "more than one JSON object",
		`{"tokenLifetime":"48h"}`: "annotation towline.dev/agent-options: tokenLifetime",
	} {
		_, err := join.ParseAgentOptions(text)
		wantText(t, err, want)
	}
}

package render_test

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/render"
)

// member is a member with the stored values of its release.
type member struct {
	name  string
	kept  render.Generated
	loads int
}

func (m *member) render(t *testing.T, charts *render.Charts, chartRequest render.ChartRequest) render.Release {
	t.Helper()
	chartRequest.Owner = m.name
	chartRequest.Generated = func(context.Context) (render.Generated, error) {
		m.loads++
		return m.kept, nil
	}
	release := rendered(t, charts, chartRequest)
	m.kept = m.kept.AfterRendering(release.Generated)
	return release
}

// generated returns the strings in ConfigMap "generated".
func generated(t *testing.T, release render.Release) map[string]string {
	t.Helper()
	for _, object := range release.Objects {
		if object.GetName() == "generated" {
			data, _, err := unstructured.NestedStringMap(object.Object, "data")
			if err != nil {
				t.Fatal(err)
			}
			return data
		}
	}
	t.Fatal("ConfigMap generated is missing")
	return nil
}

// generating returns a chart whose ConfigMap "generated" has the results of these calls.
func generating(calls map[string]string) examples.Chart {
	var text strings.Builder
	for key, call := range calls {
		text.WriteString("  " + key + ": {{ " + call + " | toString | quote }}\n")
	}
	return withTemplate(object("ConfigMap", "generated") + "data:\n" + text.String())
}

func TestEveryGeneratedValueIsKept(t *testing.T) {
	t.Parallel()
	calls := map[string]string{
		"randAlphaNum": "randAlphaNum 20", "randAlpha": "randAlpha 20", "randAscii": "randAscii 20 | b64enc", "randNumeric": "randNumeric 20",
		"randBytes": "randBytes 20", "randInt": "randInt 0 1000000000", "shuffle": `shuffle "abcdefghijklmnopqrstuvwxyz"`, "uuidv4": "uuidv4",
		"bcrypt": `bcrypt "password"`, "htpasswd": `htpasswd "user" "password"`, "encryptAES": `encryptAES "password" "text" `,
		"genPrivateKey": `genPrivateKey "ecdsa"`, "genCA": `(genCA "ca" 1).Cert`, "genSelfSignedCert": `(genSelfSignedCert "self" nil nil 1).Key`,
		"genCAWithKey":             `(genCAWithKey "ca" 1 (genPrivateKey "ed25519")).Cert`,
		"genSelfSignedCertWithKey": `(genSelfSignedCertWithKey "self" nil nil 1 (genPrivateKey "ed25519")).Cert`,
		"now":                      `now.UnixNano`, "ago": `ago now | printf "%s%v" (now.UnixNano | toString)`,
		"date": `date "2006-01-02T15:04:05.999999999" "no time"`, "durationRound": `durationRound now | printf "%s%v" (now.UnixNano | toString)`,
		"dateInZone": `dateInZone "2006-01-02T15:04:05.999999999" "no time" "UTC"`,
		"secret":     `randAlphaNum 20`,
	}
	chartRequest := request(t, generating(calls))
	first, second := &member{name: "first"}, &member{name: "second"}
	charts := render.NewCharts(pool)
	one := generated(t, first.render(t, charts, chartRequest))
	two := generated(t, second.render(t, charts, chartRequest))
	for call := range calls {
		if one[call] == "" || one[call] == two[call] {
			t.Errorf("%s: got %q and %q, want values of their own for two members", call, one[call], two[call])
		}
	}
	if diff := cmp.Diff(one, generated(t, first.render(t, charts, chartRequest))); diff != "" {
		t.Errorf("the same request again (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(one, generated(t, first.render(t, render.NewCharts(pool), chartRequest))); diff != "" {
		t.Errorf("after a restart (-want +got):\n%s", diff)
	}
	chartRequest.Values, chartRequest.KubeVersion, chartRequest.APIVersions = values(t, "replicas: 2\n"), "v1.37.0", []string{"v1", "example.com/v1"}
	if diff := cmp.Diff(one, generated(t, first.render(t, charts, chartRequest))); diff != "" {
		t.Errorf("with other values, version and APIs (-want +got):\n%s", diff)
	}
	for key := range first.kept {
		if strings.Contains(key, "password") {
			t.Errorf("a key has an argument: %s", key)
		}
	}
}

func TestGeneratedValuesDoNotDependOnOtherTemplates(t *testing.T) {
	t.Parallel()
	secret := object("Secret", "password") + "stringData:\n  password: {{ randAlphaNum 20 }}\n"
	chart := func(others map[string]string) examples.Chart {
		all := map[string]string{
			"templates/password.yaml": secret,
			"templates/sum.yaml": object("ConfigMap", "generated") + "data:\n  sum: {{ include (print $.Template.BasePath \"/password.yaml\") . | sha256sum }}\n" +
				"  own: {{ randAlphaNum 20 }}\n  tpl: {{ tpl \"{{ randAlphaNum 20 }}\" . }}\n",
		}
		maps.Copy(all, others)
		return examples.Chart{Files: all}
	}
	charts, m := render.NewCharts(pool), &member{name: "one"}
	before := m.render(t, charts, request(t, chart(nil)))
	after := m.render(t, charts, request(t, chart(map[string]string{
		"templates/zz.yaml": "# {{ randAlphaNum 20 }}", "templates/aa.yaml": "# {{ randAlphaNum 20 }}", "templates/a/b/c.yaml": "# {{ randAlphaNum 20 }}",
		"charts/greeting/templates/a.yaml": "# {{ randAlphaNum 20 }}",
	})))
	if password(before.Objects) == "" || password(before.Objects) != password(after.Objects) {
		t.Errorf("password: got %q, want %q as before", password(after.Objects), password(before.Objects))
	}
	if diff := cmp.Diff(generated(t, before), generated(t, after)); diff != "" {
		t.Errorf("values differ (-before +after):\n%s", diff)
	}
	data := generated(t, before)
	text := strings.ReplaceAll(secret, "{{ randAlphaNum 20 }}", password(before.Objects))
	if want := fmt.Sprintf("%x", sha256.Sum256([]byte(text))); data["sum"] != want {
		t.Errorf("the checksum is not that of the Secret: got %s, want %s", data["sum"], want)
	}
	if data["own"] == password(before.Objects) || data["own"] == data["tpl"] {
		t.Errorf("calls in different places have the same result: %v, %s", data, password(before.Objects))
	}
}

func TestGeneratedCertificatesChainToTheirCA(t *testing.T) {
	t.Parallel()
	text := `{{ $ca := genCA "ca" 10 }}{{ $leaf := genSignedCert "leaf.example.com" nil (list "leaf.example.com") 10 $ca }}` +
		object("ConfigMap", "generated") + "data:\n  ca: {{ $ca.Cert | b64enc }}\n  leaf: {{ $leaf.Cert | b64enc }}\n" +
		"  included: {{ include \"sub.certificate\" (dict \"ca\" $ca) | b64enc }}\n"
	chartRequest := request(t, examples.Chart{Files: map[string]string{
		"templates/added.yaml": text,
		"charts/greeting/templates/_cert.tpl": `{{ define "sub.certificate" }}` +
			`{{ (genSignedCertWithKey "leaf.example.com" nil (list "leaf.example.com") 10 .ca (genPrivateKey "ecdsa")).Cert }}{{ end }}`,
	}})
	m := &member{name: "one"}
	data := generated(t, m.render(t, render.NewCharts(pool), chartRequest))
	again := generated(t, m.render(t, render.NewCharts(pool), chartRequest)) // the CA is a kept one
	if diff := cmp.Diff(data, again); diff != "" {
		t.Errorf("certificates differ (-want +got):\n%s", diff)
	}
	roots := x509.NewCertPool()
	roots.AddCert(certificate(t, data["ca"]))
	for _, name := range []string{"leaf", "included"} {
		if _, err := certificate(t, data[name]).Verify(x509.VerifyOptions{Roots: roots, DNSName: "leaf.example.com"}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// password returns the password in the Secret of a release.
func password(objects []*unstructured.Unstructured) string {
	for _, object := range objects {
		if object.GetKind() == "Secret" {
			text, _, _ := unstructured.NestedString(object.Object, "stringData", "password")
			return text
		}
	}
	return ""
}

func certificate(t *testing.T, encoded string) *x509.Certificate {
	t.Helper()
	raw, err := base64.StdEncoding.DecodeString(encoded)
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(raw)
	if block == nil {
		t.Fatalf("no certificate in %q", raw)
	}
	parsed, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return parsed
}

func TestChartThatDoesNotGenerateIsShared(t *testing.T) {
	t.Parallel()
	// The function is there, but not called with these values.
	chartRequest := request(t, withTemplate("{{ if .Values.generate }}# {{ randAlphaNum 5 }}{{ end }}\n"+
		object("ConfigMap", "generated")+"data:\n  keys: {{ keys (dict \"c\" 1 \"a\" 2 \"b\" 3) | join \",\" }}{{ values (dict \"c\" 1 \"a\" 2 \"b\" 3) | join \",\" }}\n"+
		"  day: {{ date \"2006\" 86400 | quote }}\n"))
	charts, m := render.NewCharts(pool), &member{name: "one"}
	release := m.render(t, charts, chartRequest)
	if m.loads != 0 || release.Generated != nil || release.Unanswered {
		t.Errorf("got %d loads and generated values %v, want none", m.loads, release.Generated)
	}
	if diff := cmp.Diff(map[string]string{"keys": "a,b,c2,3,1", "day": "1970"}, generated(t, release)); diff != "" {
		t.Errorf("data differs (-want +got):\n%s", diff)
	}
	chartRequest.Values = values(t, "generate: true\n")
	if release = m.render(t, charts, chartRequest); m.loads != 1 || len(release.Generated) != 1 {
		t.Errorf("got %d loads and generated values %v, want one of each", m.loads, release.Generated)
	}
}

func TestFailureToLoadGeneratedValues(t *testing.T) {
	t.Parallel()
	chartRequest := request(t, withTemplate("# {{ uuidv4 }}"))
	failure := errors.New("the hub does not answer")
	chartRequest.Generated = func(context.Context) (render.Generated, error) { return nil, failure }
	_, err := render.NewCharts(pool).Render(t.Context(), chartRequest)
	var invalid phase.TerminalError
	if !errors.Is(err, failure) || errors.As(err, &invalid) {
		t.Errorf("got %v, want an error to try again after", err)
	}
}

func TestLookupReadsTheMember(t *testing.T) {
	t.Parallel()
	chartRequest := request(t, withTemplate(object("ConfigMap", "generated")+
		"data:\n  found: {{ (lookup \"v1\" \"Secret\" .Release.Namespace \"there\").data | default \"nothing\" | quote }}\n"))
	charts := render.NewCharts(pool)
	shared := rendered(t, charts, chartRequest)
	if got := generated(t, shared)["found"]; !shared.Unanswered || got != "nothing" {
		t.Errorf("without a cluster: got %q, unanswered is %t; want nothing, unanswered", got, shared.Unanswered)
	}
	content := "first"
	chartRequest.Owner, chartRequest.Lookup = "one", func(apiVersion, kind, namespace, name string) (map[string]any, error) {
		return map[string]any{"data": strings.Join([]string{apiVersion, kind, namespace, name, content}, " ")}, nil
	}
	for _, content = range []string{"first", "second"} {
		if got, want := generated(t, rendered(t, charts, chartRequest))["found"], "v1 Secret site there "+content; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	chartRequest.Lookup = func(string, string, string, string) (map[string]any, error) {
		return nil, errors.New("forbidden to read")
	}
	if _, err := charts.Render(t.Context(), chartRequest); err == nil || !strings.Contains(err.Error(), "forbidden to read") {
		t.Errorf("got %v, want the error of the lookup", err)
	}
}

func TestChartMayGenerateAndLookUp(t *testing.T) {
	t.Parallel()
	chartRequest := request(t, withTemplate(`{{ $found := lookup "v1" "Secret" .Release.Namespace "there" }}`+object("ConfigMap", "generated")+
		"data:\n  password: {{ $found.password | default (randAlphaNum 20) }}\n"))
	charts, m := render.NewCharts(pool), &member{name: "one"}
	first, again := m.render(t, charts, chartRequest), m.render(t, charts, chartRequest)
	if !first.Unanswered || !first.MemberSpecific || generated(t, first)["password"] != generated(t, again)["password"] {
		t.Errorf("in pull mode: got %v, then %v", generated(t, first), generated(t, again))
	}
	if first.Objects[0] != again.Objects[0] {
		t.Error("in pull mode: the same release was rendered twice")
	}
	chartRequest.Lookup = func(string, string, string, string) (map[string]any, error) {
		return map[string]any{"password": "found"}, nil
	}
	if got := generated(t, m.render(t, charts, chartRequest))["password"]; got != "found" {
		t.Errorf("in push mode: got %q, want the password of the member", got)
	}
}

// TestLookupReadsAgainForOtherInputs renders a chart that looks up an object that it has deployed itself. The found
// object alone must cause no revision.
func TestLookupReadsAgainForOtherInputs(t *testing.T) {
	t.Parallel()
	chartRequest := request(t, withTemplate(`{{ $found := lookup "v1" "Secret" .Release.Namespace "there" }}`+object("ConfigMap", "generated")+
		"data:\n  found: {{ $found.count | default 0 | quote }}\n  password: {{ $found.password | default (randAlphaNum 20) }}\n"+
		"  sum: {{ toJson $found | sha256sum }}\n  api: {{ .Capabilities.APIVersions.Has \"example.com/v1\" | quote }}\n"))
	count := int64(0)
	chartRequest.Lookup = func(string, string, string, string) (map[string]any, error) {
		if count == 0 {
			return map[string]any{}, nil
		}
		return map[string]any{"count": count, "password": "deployed"}, nil
	}
	m := &member{name: "one"}
	first := generated(t, m.render(t, render.NewCharts(pool), chartRequest))
	if first["found"] != "0" || len(first["password"]) != 20 {
		t.Fatalf("the first rendering has %v", first)
	}
	count = 1000000
	want := maps.Clone(first)
	check := func(when string, charts *render.Charts) {
		t.Helper()
		if diff := cmp.Diff(want, generated(t, m.render(t, charts, chartRequest))); diff != "" {
			t.Errorf("%s (-want +got):\n%s", when, diff)
		}
	}
	charts := render.NewCharts(pool)
	check("after a restart", charts)
	check("again", charts)
	chartRequest.APIVersions, want["api"] = append(chartRequest.APIVersions, "example.com/v1"), "true"
	check("with another API on the member", charts)

	chartRequest.Values = map[string]any{"other": "value"}
	want["found"], want["password"] = "1000000", "deployed"
	want["sum"] = generated(t, m.render(t, charts, chartRequest))["sum"]
	check("with other values", charts)
	size := len(m.kept)
	count = 2000000
	check("with other values after a restart", render.NewCharts(pool))
	for _, count = range []int64{3, 4, 5} {
		chartRequest.Values = map[string]any{"other": count}
		if got := generated(t, m.render(t, charts, chartRequest))["found"]; got != fmt.Sprint(count) {
			t.Errorf("with value %d: found %s", count, got)
		}
	}
	if len(m.kept) != size {
		t.Errorf("%d results are kept, want %d: %v", len(m.kept), size, m.kept)
	}
}

func TestLookupComesBeforeFailure(t *testing.T) {
	t.Parallel()
	chartRequest := request(t, withTemplate("{{ if not (lookup \"v1\" \"Namespace\" \"\" \"prepared\") }}{{ fail \"prepare it\" }}{{ end }}"))
	charts := render.NewCharts(pool)
	if _, err := charts.Render(t.Context(), chartRequest); err == nil || !strings.Contains(err.Error(), "prepare it") {
		t.Errorf("without a cluster: got %v, want the failure", err)
	}
	chartRequest.Lookup = func(string, string, string, string) (map[string]any, error) {
		return map[string]any{"kind": "Namespace"}, nil
	}
	rendered(t, charts, chartRequest)
}

func TestRevisionAndOperation(t *testing.T) {
	t.Parallel()
	charts := render.NewCharts(pool)
	chartRequest := request(t, withTemplate(object("ConfigMap", "generated")+
		"data:\n  revision: {{ .Release.Revision | quote }}\n  operation: \"{{ .Release.IsInstall }} {{ .Release.IsUpgrade }}\"\n"))
	inputs, err := charts.InputsDigest(chartRequest)
	if err != nil || inputs == "" {
		t.Fatalf("got inputs %q, error %v", inputs, err)
	}
	if diff := cmp.Diff(map[string]string{"revision": "1", "operation": "true false"}, generated(t, rendered(t, charts, chartRequest))); diff != "" {
		t.Errorf("installation (-want +got):\n%s", diff)
	}
	chartRequest.Revision, chartRequest.IsUpgrade = 7, true
	if diff := cmp.Diff(map[string]string{"revision": "7", "operation": "false true"}, generated(t, rendered(t, charts, chartRequest))); diff != "" {
		t.Errorf("upgrade (-want +got):\n%s", diff)
	}
	if got, err := charts.InputsDigest(chartRequest); err != nil || got != inputs {
		t.Errorf("got inputs %q, error %v, want %q whatever the revision", got, err, inputs)
	}
	chartRequest.Values = values(t, "replicas: 2\n")
	if got, err := charts.InputsDigest(chartRequest); err != nil || got == inputs {
		t.Errorf("got inputs %q, error %v, want others for other values", got, err)
	}
	plain := request(t, examples.Chart{})
	if got, err := charts.InputsDigest(plain); err != nil || got != "" {
		t.Errorf("got inputs %q, error %v, want none for a chart that does not look", got, err)
	}
	for message, looks := range map[string]bool{
		"{{ .Release.IsUpgrade }}": true, "{{ toYaml .Release }}": true, "{{ .Release.Name }} of .Release }}": false,
	} {
		plain.Values = map[string]any{"message": message}
		if got, err := charts.InputsDigest(plain); err != nil || (got != "") != looks {
			t.Errorf("got inputs %q, error %v for the value %q, want some: %v", got, err, message, looks)
		}
	}
}

// TestLargeResultsOfLookupAreNotKept looks up results around the limit of 64 KiB, twice each.
func TestLargeResultsOfLookupAreNotKept(t *testing.T) {
	t.Parallel()
	chartRequest := request(t, withTemplate(`{{ $found := lookup "v1" "ConfigMapList" "" "" }}`+object("ConfigMap", "generated")+
		"data:\n  size: {{ $found.data | len | quote }}\n  password: {{ randAlphaNum 20 }}\n"))
	for size, want := range map[int]int{60 << 10: 1, 70 << 10: 2} {
		reads := 0
		chartRequest.Lookup = func(string, string, string, string) (map[string]any, error) {
			reads++
			return map[string]any{"data": strings.Repeat("x", size)}, nil
		}
		m, charts := &member{name: "one"}, render.NewCharts(pool)
		first, second := m.render(t, charts, chartRequest), m.render(t, charts, chartRequest)
		if diff := cmp.Diff(generated(t, first), generated(t, second)); diff != "" {
			t.Errorf("%d bytes: the renderings differ (-want +got):\n%s", size, diff)
		}
		if !second.MemberSpecific {
			t.Errorf("%d bytes: other members share the rendering", size)
		}
		if reads != want {
			t.Errorf("%d bytes: got %d reads, want %d", size, reads, want)
		}
		kept := 0
		for _, result := range m.kept {
			kept += len(result)
		}
		if kept > 64<<10 {
			t.Errorf("%d bytes: %d are kept", size, kept)
		}
	}
}

// TestGeneratedValuesCountInTheCache generates 40 MiB for five members. The cache has room for 32 MiB.
func TestGeneratedValuesCountInTheCache(t *testing.T) {
	t.Parallel()
	chartRequest := request(t, generating(map[string]string{"size": "randBytes 6291456 | len"}))
	charts := render.NewCharts(pool)
	var members []*member
	var former []render.Release
	for _, name := range []string{"one", "two", "three", "four", "five"} {
		members = append(members, &member{name: name})
		former = append(former, members[len(members)-1].render(t, charts, chartRequest))
	}
	for i, want := range map[int]bool{4: true, 0: false} {
		if cached := members[i].render(t, charts, chartRequest).Objects[0] == former[i].Objects[0]; cached != want {
			t.Errorf("member %s: cached is %t, want %t", members[i].name, cached, want)
		}
	}
}

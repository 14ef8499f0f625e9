package hub_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/examples"
)

// readSeen returns the data of the ConfigMap "seen" on a member.
func (w *world) readSeen(member string) (map[string]string, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for key, found := range w.deployed {
		for _, item := range found.Items {
			for _, obj := range item.Objects {
				if key == member+" "+found.ID.String() && obj.GetName() == "seen" {
					if !item.Sensitive {
						return nil, errors.New("item not sensitive")
					}
					data, _, err := unstructured.NestedStringMap(obj.Object, "data")
					return data, err
				}
			}
		}
	}
	return nil, errors.New("member " + member + " has no ConfigMap seen")
}

// wantSeen waits until the ConfigMap "seen" on a member has this message and operation, and returns its password.
func (w *world) wantSeen(member, message, operation string) string {
	w.Helper()
	var password string
	w.eventually("release on "+member, func() error {
		data, err := w.readSeen(member)
		if err != nil {
			return err
		}
		password = data["password"]
		if data["message"] != message || data["operation"] != operation {
			return fmt.Errorf("got %v, want message %q and operation %q", data, message, operation)
		}
		return nil
	})
	return password
}

func TestGeneratedValuesAreStableOnUpgrade(t *testing.T) {
	w := newWorld(t)
	w.createReadyMember("one", w.prodLabels())
	w.createReadyMember("two", w.prodLabels())
	template := "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: seen}\ndata:\n  password: {{ randAlphaNum 20 }}\n  message: {{ .Values.message }}\n" +
		"  operation: {{ .Release.Revision }} {{ .Release.IsUpgrade }}\n  looked: \"{{ lookup \"v1\" \"Namespace\" \"\" \"default\" | len }}\"\n"
	address := w.serveCharts(examples.Chart{Files: map[string]string{"templates/seen.yaml": template}})
	profile := w.createProfile(deployChart(address, func(c *configv1beta1.HelmChart) { c.Values = "message: first\n" }))
	one, two := w.wantSeen("one", "first", "1 false"), w.wantSeen("two", "first", "1 false")
	if len(one) != 20 || one == two {
		t.Errorf("got passwords %q and %q, want two", one, two)
	}
	for i, message := range []string{"second", "third"} {
		update(w, profile, func(p *configv1beta1.ClusterProfile) { p.Spec.HelmCharts[0].Values = "message: " + message + "\n" })
		for member, password := range map[string]string{"one": one, "two": two} {
			if got := w.wantSeen(member, message, fmt.Sprintf("%d true", i+2)); got != password {
				t.Errorf("%s: got password %q after an upgrade, want %q", member, got, password)
			}
		}
	}
	summary := w.wantFeature(profile, "one", helm(libv1beta1.FeatureStatusProvisioned, ""))
	if got := w.listGenerated(); len(got) != 2 {
		t.Errorf("got %d Secrets with generated values, want one for each member", len(got))
	}
	w.eventually("events", func() error {
		count := 0
		for _, event := range w.listEvents(summary) {
			if strings.HasPrefix(event, "Warning LookupUnanswered") {
				count++
			}
		}
		if count != 1 {
			return fmt.Errorf("got %d events about lookup, want one: %v", count, w.listEvents(summary))
		}
		return nil
	})
}

package attacks

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
)

// hostileContent uses all time or memory. message is a part of the message about it.
type hostileContent struct{ name, annotation, text, message string }

func hostileContents() []hostileContent {
	return []hostileContent{
		{"endless", libv1beta1.TemplateAnnotation, "{{ range 1000000000000 }}{{ range 1000000000000 }}{{ end }}{{ end }}", "took longer than"},
		{"long", libv1beta1.TemplateAnnotation, "{{ range 1000000000000 }}xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx{{ end }}", "larger than"},
		{"repeating", libv1beta1.TemplateAnnotation, `{{ repeat 2000000000 "x" }}`, "of memory"},
		{"looping", libv1beta1.LuaAnnotation, "function evaluate() while true do end end", "steps"},
		{"constants", libv1beta1.LuaAnnotation, manyConstants(100_000), "took longer than"},
		{"allocating", libv1beta1.LuaAnnotation, "function evaluate() local t, list = {}, {}; for i = 1, 200 do list[i] = i end; for i = 1, 1e9 do t[i] = {unpack(list)} end end", "too much memory"},
		// This content needs no child process.
		{"aliases", "example.com/plain", aliasConfigMap(50<<10, 4000), "aliases make it too large"},
	}
}

// aliasConfigMap returns a ConfigMap with aliases of a text of size bytes. The parser does not limit their copies.
func aliasConfigMap(size, aliases int) string {
	return "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a, namespace: default}\nx: &a " + strings.Repeat("x", size) +
		"\ny: [" + strings.Repeat("*a, ", aliases) + "]\n"
}

// manyConstants returns a script with n constants. The compiler compares each one with all others.
func manyConstants(n int) string {
	var script strings.Builder
	script.WriteString("function evaluate() return {")
	for i := range n {
		fmt.Fprintf(&script, "'%d',", i)
	}
	script.WriteString("} end")
	return script.String()
}

// TestHostileContentOfATenant: a tenant has contents that use all time or memory, for several clusters: together more
// than the hub has workers. Each fails at its limit, and the changes of another tenant are delivered meanwhile.
func TestHostileContentOfATenant(t *testing.T) {
	w := newWorld(t)
	other := &world{TB: w.TB, Client: w.Client, hub: w.hub, ns: w.hub.Namespace(t, "other")}
	victim, attacker := other.tenant(), w.tenant()
	delivery := fleet.FromSveltosCluster(other.pullCluster(victim, "healthy")).DeliveryNamespace
	content := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: other.ns, Name: "content"}, Data: configMap("default", "first")}
	w.noError(victim.Create(t.Context(), content))
	other.createContentProfile(victim, "healthy", "healthy")
	// delivered returns the references to the content for the cluster of the victim.
	delivered := func() (items []libv1beta1.ConfigurationItem, err error) {
		groups := &libv1beta1.ConfigurationGroupList{}
		err = w.List(t.Context(), groups, client.InNamespace(delivery))
		for _, group := range groups.Items {
			items = append(items, group.Spec.ConfigurationItems...)
		}
		return items, err
	}
	other.awaitBundles(delivery)

	const clusters = 6 // with 7 contents, 42 summaries for 30 workers
	for i := range clusters {
		w.pullCluster(attacker, fmt.Sprint("hostile-", i))
	}
	for _, hostile := range hostileContents() {
		w.noError(attacker.Create(t.Context(), &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: hostile.name, Annotations: map[string]string{hostile.annotation: "ok"}},
			Data:       map[string]string{"objects.yaml": hostile.text},
		}))
		w.createProfile(attacker, hostile.name, func(spec *configv1beta1.ProfileSpec) {
			spec.PolicyRefs = []libv1beta1.PolicyRef{{Kind: libv1beta1.SourceConfigMap, Namespace: w.ns, Name: hostile.name}}
		})
	}
	w.awaitSummaries(clusters * len(hostileContents()))
	for i := range 3 {
		before, err := delivered()
		w.noError(err)
		content.Data = configMap("default", fmt.Sprint("change ", i))
		w.noError(victim.Update(t.Context(), content))
		from := time.Now()
		w.eventually("a change of the other tenant is delivered", func() error {
			after, err := delivered()
			if err == nil && slices.EqualFunc(before, after, func(a, b libv1beta1.ConfigurationItem) bool { return fmt.Sprint(a) == fmt.Sprint(b) }) {
				err = fmt.Errorf("the content is still %v", after)
			}
			return err
		})
		if took := time.Since(from); took > maxDelay {
			t.Errorf("change %d of the other tenant was delivered after %s", i, took)
		}
	}
	for _, hostile := range hostileContents() {
		w.awaitFailure(hostile.name, hasTexts(hostile.message))
	}
}

// awaitSummaries waits until the hub has created n summaries in the namespace of the test.
func (w *world) awaitSummaries(n int) {
	w.Helper()
	w.eventually("summaries", func() error {
		summaries := &configv1beta1.ClusterSummaryList{}
		err := w.List(w.Context(), summaries, client.InNamespace(w.ns))
		if err == nil && len(summaries.Items) < n {
			err = fmt.Errorf("there are %d summaries, want %d", len(summaries.Items), n)
		}
		return err
	})
}

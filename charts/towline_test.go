// Package charts_test renders charts/towline with the real helm command and checks the objects.
package charts_test

import (
	"bytes"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/towline/towline/internal/cli"
	"github.com/towline/towline/internal/cli/command"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// rendered holds the objects of a rendered chart by kind and name.
type rendered map[string]*unstructured.Unstructured

// template runs helm template and passes values with --set-json.
func template(t *testing.T, values ...string) (rendered, error) {
	t.Helper()
	helm, err := localkube.Binary("helm")
	if err != nil {
		t.Fatal(err)
	}
	args := []string{"template", "any", "towline", "--namespace=fleet"}
	for _, value := range values {
		args = append(args, "--set-json="+value)
	}
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(t.Context(), helm, args...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("%w: %s", err, stderr.String())
	}
	objects, err := kube.DecodeManifest(stdout.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	byName := rendered{}
	for _, object := range objects {
		byName[object.GetKind()+"/"+object.GetName()] = object
	}
	return byName, nil
}

func mustTemplate(t *testing.T, values ...string) rendered {
	t.Helper()
	objects, err := template(t, values...)
	if err != nil {
		t.Fatal(err)
	}
	return objects
}

// into decodes an object strictly: a field that its kind does not have is an error.
func (r rendered) into(t *testing.T, name string, typed any) {
	t.Helper()
	if r[name] == nil {
		t.Fatalf("no %s", name)
	}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(r[name].Object, typed, true); err != nil {
		t.Fatalf("decode %s: %v", name, err)
	}
}

func (r rendered) deployment(t *testing.T, name string) *appsv1.Deployment {
	t.Helper()
	deployment := &appsv1.Deployment{}
	r.into(t, "Deployment/"+name, deployment)
	return deployment
}

func (r rendered) container(t *testing.T, deployment string) corev1.Container {
	t.Helper()
	return r.deployment(t, deployment).Spec.Template.Spec.Containers[0]
}

// names are the names of the objects, sorted.
func (r rendered) names() []string {
	var names []string
	for name := range r {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// wantAccepted checks that towline hub has all flags in args: it must fail only because of the unknown flag that the
// check adds.
func wantAccepted(t *testing.T, args []string) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	args = append(append([]string{"towline"}, args...), "--no-such-flag")
	if code := cli.Run(t.Context(), args, command.Streams{Out: &stdout, Err: &stderr}); code == 0 || !strings.Contains(stderr.String(), "unknown flag: --no-such-flag") {
		t.Errorf("%q: exit code %d: %s", args, code, stderr.String())
	}
}

func TestDefaultsInstallOneHub(t *testing.T) {
	t.Parallel()
	objects := mustTemplate(t)
	want := []string{
		"ClusterRole/towline-admin", "ClusterRole/towline-edit", "ClusterRole/towline-hub", "ClusterRole/towline-metrics-reader", "ClusterRole/towline-view",
		"ClusterRoleBinding/towline-hub", "ClusterRoleBinding/towline-hub-self",
		"Deployment/towline-hub", "Service/towline-hub-metrics", "ServiceAccount/towline-hub",
	}
	if diff := cmp.Diff(want, objects.names()); diff != "" {
		t.Errorf("objects (-want +got):\n%s", diff)
	}
	container := objects.container(t, "towline-hub")
	if container.Image != "towline:latest" {
		t.Errorf("image %s", container.Image)
	}
	args := []string{
		"hub", "--leader-elect", "--install-crds", "--register-self=true", "--agent-image=towline:latest", "--diagnostics-address=:8443",
		"--outdated-chart-interval=1h", "--health-address=:9440", "--cache-dir=/cache", "--log-format=text", "--v=0",
	}
	if diff := cmp.Diff(args, container.Args); diff != "" {
		t.Errorf("arguments (-want +got):\n%s", diff)
	}
	wantAccepted(t, container.Args)
	for name, object := range objects {
		if namespace := object.GetNamespace(); namespace != "" && namespace != "fleet" {
			t.Errorf("%s is in namespace %s", name, namespace)
		}
	}
}

func TestShardsAreHubsOfTheirOwn(t *testing.T) {
	t.Parallel()
	objects := mustTemplate(t, `shards=["eu","us"]`, `replicas=2`, `agent={"image":"r.example.com/agent:v2","patchConfigMap":"platform/patches"}`,
		`image={"repository":"r.example.com/towline","tag":"v2"}`, `managementCluster={"url":"https://hub.example.com","ca":"-----BEGIN CERTIFICATE-----\nx"}`)
	for _, name := range []string{"towline-hub", "towline-hub-eu", "towline-hub-us"} {
		deployment := objects.deployment(t, name)
		key, isShard := strings.CutPrefix(name, "towline-hub-")
		container := deployment.Spec.Template.Spec.Containers[0]
		for arg, want := range map[string]bool{
			"--shard-key=" + key: isShard, "--install-crds": !isShard, "--register-self=true": !isShard,
			"--agent-patch-config-map=platform/patches": !isShard, "--agent-image=r.example.com/agent:v2": true,
			"--management-cluster-url=https://hub.example.com": true, "--management-cluster-ca=/etc/towline/ca.crt": true,
		} {
			if got := slices.Contains(container.Args, arg); got != want {
				t.Errorf("%s: argument %s is %t, want %t", name, arg, got, want)
			}
		}
		wantAccepted(t, container.Args)
		if *deployment.Spec.Replicas != 2 || container.Image != "r.example.com/towline:v2" {
			t.Errorf("%s: %d replicas of %s", name, *deployment.Spec.Replicas, container.Image)
		}
		for _, other := range []string{"towline-hub", "towline-hub-eu", "towline-hub-us"} {
			labels := objects.deployment(t, other).Spec.Template.Labels
			selected := true
			for key, value := range deployment.Spec.Selector.MatchLabels {
				selected = selected && labels[key] == value
			}
			if selected != (other == name) {
				t.Errorf("%s selects the pods of %s: %t", name, other, selected)
			}
		}
	}
	ca := &corev1.ConfigMap{}
	objects.into(t, "ConfigMap/towline-hub-ca", ca)
	if want := "-----BEGIN CERTIFICATE-----\nx"; ca.Data["ca.crt"] != want {
		t.Errorf("ca.crt is %q, want %q", ca.Data["ca.crt"], want)
	}
}

func TestRightsFollowTheValues(t *testing.T) {
	t.Parallel()
	groups := func(objects rendered) map[string]bool {
		role, has := &rbacv1.ClusterRole{}, map[string]bool{}
		objects.into(t, "ClusterRole/towline-hub", role)
		for _, rule := range role.Rules {
			for _, group := range rule.APIGroups {
				has[group] = true
			}
		}
		return has
	}
	most, least := mustTemplate(t), mustTemplate(t, `registerSelf=false`, `crds.install=false`, `metrics.enabled=false`)
	for _, group := range []string{"apiextensions.k8s.io", "authentication.k8s.io", "authorization.k8s.io"} {
		if !groups(most)[group] || groups(least)[group] {
			t.Errorf("group %s: %t with everything on, %t with everything off", group, groups(most)[group], groups(least)[group])
		}
	}
	want := []string{
		"ClusterRole/towline-admin", "ClusterRole/towline-edit", "ClusterRole/towline-hub", "ClusterRole/towline-view",
		"ClusterRoleBinding/towline-hub", "Deployment/towline-hub", "ServiceAccount/towline-hub",
	}
	if diff := cmp.Diff(want, least.names()); diff != "" {
		t.Errorf("objects (-want +got):\n%s", diff)
	}
	args := least.container(t, "towline-hub").Args
	wantAccepted(t, args)
	for _, arg := range []string{"--register-self=false", "--diagnostics-address=", "--outdated-chart-interval=0s"} {
		if !slices.Contains(args, arg) {
			t.Errorf("no argument %s in %q", arg, args)
		}
	}
	if slices.Contains(args, "--install-crds") {
		t.Errorf("argument --install-crds in %q", args)
	}
	shard := mustTemplate(t, `shards=["eu"]`, `registerSelf=false`).container(t, "towline-hub-eu").Args
	if !slices.Contains(shard, "--register-self=false") {
		t.Errorf("a shard has the arguments %q and would give mgmt/mgmt the identity of the hub", shard)
	}
}

func TestEveryValueReachesThePod(t *testing.T) {
	t.Parallel()
	objects := mustTemplate(t, `image.pullSecrets=["login"]`, `image.pullPolicy="Always"`, `resources={"limits":{"memory":"3Gi"}}`,
		`cache={"persistent":true,"size":"7Gi","storageClass":"fast","accessMode":"ReadWriteMany"}`, `log={"format":"json","verbosity":6}`,
		`serviceAccount.annotations={"example.com/role":"hub"}`, `podLabels={"l":"1"}`, `podAnnotations={"a":"1"}`, `nodeSelector={"n":"1"}`,
		`tolerations=[{"key":"infra","operator":"Exists"}]`, `affinity={"nodeAffinity":{}}`, `priorityClassName="system-cluster-critical"`,
		`topologySpreadConstraints=[{"maxSkew":1,"topologyKey":"zone","whenUnsatisfiable":"ScheduleAnyway"}]`,
		`extraEnv=[{"name":"HTTPS_PROXY","value":"http://proxy"}]`, `extraArgs=["--cache-dir=/elsewhere"]`,
		`metrics.readers=[{"kind":"ServiceAccount","name":"prometheus","namespace":"monitoring"}]`)
	deployment := objects.deployment(t, "towline-hub")
	pod, container := deployment.Spec.Template.Spec, deployment.Spec.Template.Spec.Containers[0]
	claim, account, readers := &corev1.PersistentVolumeClaim{}, &corev1.ServiceAccount{}, &rbacv1.ClusterRoleBinding{}
	objects.into(t, "PersistentVolumeClaim/towline-hub-cache", claim)
	objects.into(t, "ServiceAccount/towline-hub", account)
	objects.into(t, "ClusterRoleBinding/towline-metrics-reader", readers)
	wantAccepted(t, container.Args)
	for what, holds := range map[string]bool{
		"image.pullSecrets":          pod.ImagePullSecrets[0].Name == "login",
		"image.pullPolicy":           container.ImagePullPolicy == corev1.PullAlways,
		"resources":                  container.Resources.Limits.Memory().String() == "3Gi",
		"cache.persistent":           pod.Volumes[0].PersistentVolumeClaim.ClaimName == "towline-hub-cache" && pod.Volumes[0].EmptyDir == nil,
		"cache.size":                 claim.Spec.Resources.Requests.Storage().String() == "7Gi",
		"cache.storageClass":         *claim.Spec.StorageClassName == "fast",
		"cache.accessMode":           claim.Spec.AccessModes[0] == corev1.ReadWriteMany && deployment.Spec.Strategy.RollingUpdate.MaxSurge.IntValue() == 1,
		"log":                        slices.Contains(container.Args, "--log-format=json") && slices.Contains(container.Args, "--v=6"),
		"serviceAccount.annotations": account.Annotations["example.com/role"] == "hub",
		"podLabels":                  deployment.Spec.Template.Labels["l"] == "1",
		"podAnnotations":             deployment.Spec.Template.Annotations["a"] == "1",
		"nodeSelector":               pod.NodeSelector["n"] == "1",
		"tolerations":                pod.Tolerations[0].Key == "infra",
		"affinity":                   pod.Affinity.NodeAffinity != nil,
		"priorityClassName":          pod.PriorityClassName == "system-cluster-critical",
		"topologySpreadConstraints":  pod.TopologySpreadConstraints[0].TopologyKey == "zone",
		"extraEnv":                   container.Env[len(container.Env)-1].Name == "HTTPS_PROXY",
		"extraArgs":                  container.Args[len(container.Args)-1] == "--cache-dir=/elsewhere",
		"metrics.readers":            readers.Subjects[0].Name == "prometheus",
	} {
		if !holds {
			t.Errorf("%s is not obeyed", what)
		}
	}
	claimed := mustTemplate(t, `cache={"persistent":true,"existingClaim":"mine"}`)
	if deployment = claimed.deployment(t, "towline-hub"); deployment.Spec.Template.Spec.Volumes[0].PersistentVolumeClaim.ClaimName != "mine" {
		t.Error("cache.existingClaim is not obeyed")
	}
	if claimed["PersistentVolumeClaim/towline-hub-cache"] != nil {
		t.Error("a claim is made beside cache.existingClaim")
	}
	if surge := deployment.Spec.Strategy.RollingUpdate.MaxSurge.IntValue(); surge != 0 {
		t.Errorf("%d pods beside the old one, which holds the cache", surge)
	}
}

// TestExtraEnvReplacesDefaults: server-side apply, which Helm uses, refuses a list with two variables of one name.
func TestExtraEnvReplacesDefaults(t *testing.T) {
	t.Parallel()
	for _, variable := range mustTemplate(t).container(t, "towline-hub").Env {
		extra := fmt.Sprintf(`extraEnv=[{"name":%q,"value":"mine"}]`, variable.Name)
		var values []string
		for _, got := range mustTemplate(t, extra).container(t, "towline-hub").Env {
			if got.Name == variable.Name {
				values = append(values, got.Value)
			}
		}
		if diff := cmp.Diff([]string{"mine"}, values); diff != "" {
			t.Errorf("values of %s (-want +got):\n%s", variable.Name, diff)
		}
	}
}

func TestWrongValuesAreRefused(t *testing.T) {
	t.Parallel()
	for value, want := range map[string]string{
		`replica=2`:                            "additional properties 'replica' not allowed",
		`image.tags="v1"`:                      "additional properties 'tags' not allowed",
		`shards=["EU"]`:                        "/shards/0",
		`shards=["eu","eu"]`:                   "/shards",
		`managementCluster.url="http://plain"`: "/managementCluster/url",
		`managementCluster.ca="ca.pem"`:        "/managementCluster/ca",
		`agent.patchConfigMap="patches"`:       "/agent/patchConfigMap",
		`metrics.outdatedChartInterval="1 h"`:  "/metrics/outdatedChartInterval",
		`cache.accessMode="ReadOnlyMany"`:      "/cache/accessMode",
		`log.format="yaml"`:                    "/log/format",
	} {
		_, err := template(t, value)
		if err == nil {
			err = errors.New("accepted")
		}
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want an error with %q", value, err, want)
		}
	}
}

func TestRolesOfUsersAreAggregated(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"view", "edit", "admin"} {
		label := "rbac.authorization.k8s.io/aggregate-to-" + name
		for set, want := range map[string]string{"aggregateRoles=true": "true", "aggregateRoles=false": ""} {
			role := &rbacv1.ClusterRole{}
			mustTemplate(t, set).into(t, "ClusterRole/towline-"+name, role)
			if got := role.Labels[label]; got != want {
				t.Errorf("%s: label %s of %s is %q, want %q", set, label, role.Name, got, want)
			}
		}
	}
}

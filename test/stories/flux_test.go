package stories

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/localkube"
	"github.com/towline/towline/internal/source"
)

// fluxSources are the objects of Flux; the URLs of the servers follow.
const fluxSources = `
apiVersion: v1
kind: Secret
metadata: {namespace: flux, name: git-login}
stringData:
  username: me
  password: %[1]s
  ca.crt: %[2]q
---
apiVersion: source.toolkit.fluxcd.io/v1
kind: GitRepository
metadata: {namespace: flux, name: platform}
spec: {url: %[3]q, ref: {branch: main}, interval: 2s, timeout: 10s, secretRef: {name: git-login}}
---
apiVersion: source.toolkit.fluxcd.io/v1
kind: OCIRepository
metadata: {namespace: flux, name: platform}
spec: {url: %[4]q, ref: {tag: latest}, interval: 2s, insecure: true}
---
apiVersion: v1
kind: Secret
metadata: {namespace: flux, name: bucket-login}
stringData: {accesskey: user, secretkey: user-secret}
---
apiVersion: source.toolkit.fluxcd.io/v1
kind: Bucket
metadata: {namespace: flux, name: platform}
spec: {endpoint: %[5]q, bucketName: platform, interval: 2s, insecure: true, region: us-east-1, secretRef: {name: bucket-login}}
`

// fluxKinds are the kinds of Flux's sources by the first word of the names of their objects.
func fluxKinds() map[string]string {
	return map[string]string{"git": "GitRepository", "oci": "OCIRepository", "bucket": "Bucket"}
}

// fluxProfiles are the profiles of the story, by name: manifests, a chart and a kustomization of each kind of source,
// and others. They are applied before Flux is installed.
func fluxProfiles() map[string]string {
	all := map[string]string{
		"plain": "policyRefs: [{kind: ConfigMap, namespace: flux, name: plain}]",
		"moved": "policyRefs: [{kind: GitRepository, namespace: flux, name: platform, path: moved}]",
	}
	for name, kind := range fluxKinds() {
		all[name] = strings.ReplaceAll(`policyRefs:
  - {kind: KIND, namespace: flux, name: platform, path: ./apps/web}
  - {kind: KIND, namespace: flux, name: platform, path: apps/db/}`, "KIND", kind)
		all[name+"-chart"] = fmt.Sprintf(`helmCharts:
  - {repositoryURL: "%s://flux/platform/charts/%s", releaseName: hello, releaseNamespace: %[2]s-hello}`, strings.ToLower(kind), name)
		all[name+"-kustomized"] = "kustomizationRefs: [{kind: " + kind + ", namespace: flux, name: platform, path: kustomized/overlay}]"
	}
	return all
}

// fluxStory has the servers and the members of TestFluxSources.
type fluxStory struct {
	*world
	git    *gitServer
	oci    *ociRepository
	bucket *bucketServer
	// The keys of members are the names of the clusters. namespaces has their namespaces on the hub.
	members    map[string]*localkube.Plane
	namespaces map[string]string
}

// TestFluxSources deploys content that Flux's source-controller reads from a Git server, a registry and a bucket, on a
// member in pull mode and one in push mode. The profiles are applied before Flux is installed, and do not change later.
func TestFluxSources(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	s := &fluxStory{
		world: w, git: newGitServer(w.t), namespaces: map[string]string{"pull-1": "edge", "push-1": "cloud"},
		members: map[string]*localkube.Plane{"pull-1": w.pullMember("edge", "pull-1", "env=flux"), "push-1": w.pushMember("cloud", "push-1", "env=flux")},
	}
	s.beforeFluxIsInstalled()
	s.installFlux()
	controller := s.startSourceController()
	s.deliversAllSources()
	s.followsPushes()
	s.reportsBadContent()
	s.survivesGitServerOutage()
	s.survivesSourceDeletion()
	controller.kill()
	s.survivesControllerStop()
}

func (s *fluxStory) applyProfile(name, spec string) {
	s.t.Helper()
	s.apply(s.hub, fmt.Sprintf("apiVersion: config.projectsveltos.io/v1beta1\nkind: ClusterProfile\nmetadata: {name: %s}\nspec:\n  clusterSelector: {matchLabels: {env: flux}}\n  %s\n", name, spec))
}

func (s *fluxStory) applyPlainContent(text string) {
	s.t.Helper()
	s.apply(s.hub, fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {namespace: flux, name: plain}\ndata:\n  content.yaml: %q\n", fluxManifest("plain", text)))
}

// awaitText waits until a ConfigMap has the text on both members.
func (s *fluxStory) awaitText(name, text string) {
	s.t.Helper()
	for cluster, member := range s.members {
		s.eventually(fmt.Sprintf("%s has %s: %s", cluster, name, text), func() error {
			data, err := s.data(member, "flux-content", name)
			if err == nil && data["text"] != text {
				err = fmt.Errorf("it has %q", data["text"])
			}
			return err
		})
	}
}

// awaitStatus waits until the profile's summaries have a status.
func (s *fluxStory) awaitStatus(profile, status string) {
	s.t.Helper()
	for cluster, namespace := range s.namespaces {
		s.eventually(profile+" on "+cluster+" is "+status, func() error {
			return s.wantStatuses(namespace, profile+"-sveltos-"+cluster, status)
		})
	}
}

// awaitFailure waits until the profile's summaries have a message with the texts. The message has no password.
func (s *fluxStory) awaitFailure(profile string, texts ...string) {
	s.t.Helper()
	for cluster, namespace := range s.namespaces {
		s.eventually(profile+" on "+cluster+" reports the failure", func() error {
			var got configv1beta1.ClusterSummary
			if err := s.client(s.hub).Get(s.t.Context(), client.ObjectKey{Namespace: namespace, Name: profile + "-sveltos-" + cluster}, &got); err != nil {
				return err
			}
			message := failureMessage(got)
			if strings.Contains(message, gitPassword) {
				s.t.Errorf("the message has the password: %s", message)
			}
			return wantTexts(message, texts)
		})
	}
}

// fingerprintsOf returns the fingerprints of Towline's objects on the members.
func (s *fluxStory) fingerprintsOf(namespace string) map[string]fingerprint {
	s.t.Helper()
	all := map[string]fingerprint{}
	for cluster, member := range s.members {
		for name, found := range s.fingerprints(member, namespace) {
			all[cluster+" "+name] = found
		}
	}
	return all
}

// wantUntouched compares the objects on the members with before, except for the object of the profile plain.
func (s *fluxStory) wantUntouched(before map[string]fingerprint) {
	s.t.Helper()
	now := s.fingerprintsOf("flux-content")
	for _, name := range slices.Sorted(maps.Keys(before)) {
		if !strings.HasSuffix(name, " plain") && now[name] != before[name] {
			s.t.Errorf("%s has changed: %+v, before %+v", name, now[name], before[name])
		}
	}
}

// beforeFluxIsInstalled applies the profiles. The profile without Flux is deployed.
func (s *fluxStory) beforeFluxIsInstalled() {
	s.t.Helper()
	s.kubectl(s.hub, "create", "namespace", "flux")
	s.applyPlainContent("one")
	for name, spec := range fluxProfiles() {
		s.applyProfile(name, spec)
	}
	s.awaitText("plain", "one")
	s.awaitFailure("git", "GitRepository flux/platform: the hub has no kind GitRepository", "is Flux's source-controller installed?")
	for name, kind := range fluxKinds() {
		s.awaitFailure(name+"-chart", "hello", kind+" flux/platform: the hub has no kind "+kind)
		s.awaitFailure(name+"-kustomized", kind+" flux/platform: the hub has no kind "+kind)
	}
}

// deliversAllSources creates the sources.
func (s *fluxStory) deliversAllSources() {
	s.t.Helper()
	s.oci, s.bucket = s.newOCIRepository("platform"), s.newBucketServer("platform")
	s.publish("one")
	s.git.pushFiles(map[string]string{"moved/here.yaml": fluxManifest("git-moved", "one")})
	s.apply(s.hub, fmt.Sprintf(fluxSources, gitPassword, certificatePEM(s.git.Server), s.git.URL+"/repo.git", s.oci.url, s.bucket.address))
	s.awaitTexts("one", "web", "db", "kustomized", "chart")
	s.awaitText("git-moved", "one")
	for name := range fluxProfiles() {
		s.awaitStatus(name, "Provisioned")
	}
	for cluster, member := range s.members {
		for name := range fluxKinds() {
			if _, err := s.data(member, "flux-content", name+"-unused"); !apierrors.IsNotFound(err) {
				s.t.Errorf("%s has a manifest of another directory: %v", cluster, err)
			}
			if out := s.helm(member, "list", "--namespace="+name+"-hello", "--no-headers"); !strings.Contains(out, name+"-0.1.0") {
				s.t.Errorf("%s has the releases %q, want the chart %s", cluster, out, name)
			}
		}
	}
}

// publish publishes files with the text in all sources: as a commit, an artifact and the objects of a bucket.
func (s *fluxStory) publish(text string) {
	s.t.Helper()
	s.git.pushFiles(s.fluxFiles("git", text))
	s.oci.push(s.fluxFiles("oci", text))
	s.bucket.put(s.fluxFiles("bucket", text))
}

// awaitTexts waits until the objects of each kind of source have the text.
func (s *fluxStory) awaitTexts(text string, names ...string) {
	s.t.Helper()
	for kind := range fluxKinds() {
		for _, name := range names {
			s.awaitText(kind+"-"+name, text)
		}
	}
}

// followsPushes changes manifests, kustomizations and charts in all sources.
func (s *fluxStory) followsPushes() {
	s.t.Helper()
	s.publish("two")
	s.awaitTexts("two", "web", "db", "kustomized", "chart")
	for name := range fluxProfiles() {
		s.awaitStatus(name, "Provisioned")
	}
}

// reportsBadContent pushes content that cannot be deployed. The objects that were delivered before stay.
func (s *fluxStory) reportsBadContent() {
	s.t.Helper()
	before := s.fingerprintsOf("flux-content")
	s.git.git("-C", "work", "mv", "moved", "elsewhere")
	s.git.pushFiles(map[string]string{"apps/web/broken.yaml": "kind: [ConfigMap\n", "kustomized/base/kustomization.yaml": "resources: [gone.yaml]\n"})
	s.awaitFailure("git", "GitRepository flux/platform", "apps/web/broken.yaml")
	s.awaitFailure("git-kustomized", "GitRepository flux/platform, path kustomized/overlay", `kustomized/base/kustomization.yaml: resources: "gone.yaml" does not exist`)
	s.awaitFailure("moved", `GitRepository flux/platform has no directory "moved"`)
	s.wantUntouched(before)
	s.git.git("-C", "work", "mv", "elsewhere", "moved")
	s.git.pushFiles(map[string]string{
		"apps/web/broken.yaml": fluxManifest("git-mended", "three"), "kustomized/base/kustomization.yaml": "resources: [kustomized.yaml]\n",
	})
	s.awaitText("git-mended", "three")
	for _, name := range []string{"git", "git-kustomized", "moved"} {
		s.awaitStatus(name, "Provisioned")
	}
}

// survivesGitServerOutage stops the Git server until Flux reports that.
func (s *fluxStory) survivesGitServerOutage() {
	s.t.Helper()
	before := s.fingerprintsOf("flux-content")
	s.git.Close()
	s.eventually("Flux reports that the Git server does not answer", func() error {
		repository := &unstructured.Unstructured{}
		repository.SetGroupVersionKind(source.FluxGroupVersion().WithKind("GitRepository"))
		if err := s.client(s.hub).Get(s.t.Context(), client.ObjectKey{Namespace: "flux", Name: "platform"}, repository); err != nil {
			return err
		}
		conditions, _, _ := unstructured.NestedSlice(repository.Object, "status", "conditions")
		for _, condition := range conditions {
			if fields := condition.(map[string]any); fields["type"] == "Ready" && fields["status"] != "True" {
				return nil
			}
		}
		return errors.New("it is ready")
	})
	s.applyPlainContent("while the Git server is away")
	s.awaitText("plain", "while the Git server is away")
	s.awaitStatus("git", "Provisioned")
	s.wantUntouched(before)
}

// survivesSourceDeletion deletes the GitRepository.
func (s *fluxStory) survivesSourceDeletion() {
	s.t.Helper()
	before := s.fingerprintsOf("flux-content")
	s.kubectl(s.hub, "delete", "gitrepository", "-n", "flux", "platform")
	s.awaitFailure("git", "GitRepository flux/platform does not exist")
	s.awaitFailure("git-chart", "GitRepository flux/platform does not exist")
	s.awaitFailure("git-kustomized", "GitRepository flux/platform does not exist")
	s.wantUntouched(before)
}

// survivesControllerStop restarts the hub while source-controller does not run, and deploys another profile with
// content that the hub has in its cache.
func (s *fluxStory) survivesControllerStop() {
	s.t.Helper()
	before := s.fingerprintsOf("flux-content")
	s.hubProcess.kill()
	s.startHub()
	s.applyProfile("late", "policyRefs: [{kind: OCIRepository, namespace: flux, name: platform, path: apps/web}]\n  tier: 50")
	s.applyPlainContent("while source-controller is away")
	s.awaitText("plain", "while source-controller is away")
	s.awaitStatus("late", "Provisioned")
	s.awaitStatus("bucket", "Provisioned")
	s.awaitText("bucket-web", "two")
	delete(before, "pull-1 ConfigMap oci-web") // the profile with the lower tier takes it over
	delete(before, "push-1 ConfigMap oci-web")
	s.wantUntouched(before)
}

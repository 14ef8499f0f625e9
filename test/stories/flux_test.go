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
// and others. All are there before Flux is.
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

// fluxStory is TestFluxSources.
type fluxStory struct {
	*world
	git    *gitServer
	oci    *ociRepository
	bucket *bucketServer
	// members are by the name of the cluster, and namespaces have their namespaces on the hub.
	members    map[string]*localkube.Plane
	namespaces map[string]string
}

// TestFluxSources deploys what Flux's source-controller reads from a Git server, a registry and a bucket, on a member
// in pull mode and one in push mode. The profiles are there before Flux is installed, and nobody touches them later.
func TestFluxSources(t *testing.T) {
	awaitTurn(t)
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
	s.namesBadContent()
	s.outlivesTheGitServer()
	s.outlivesTheSource()
	controller.kill()
	s.outlivesTheController()
}

func (s *fluxStory) profile(name, spec string) {
	s.t.Helper()
	s.apply(s.hub, fmt.Sprintf("apiVersion: config.projectsveltos.io/v1beta1\nkind: ClusterProfile\nmetadata: {name: %s}\nspec:\n  clusterSelector: {matchLabels: {env: flux}}\n  %s\n", name, spec))
}

func (s *fluxStory) plain(text string) {
	s.t.Helper()
	s.apply(s.hub, fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {namespace: flux, name: plain}\ndata:\n  content.yaml: %q\n", fluxManifest("plain", text)))
}

// want waits until a ConfigMap has the text on both members.
func (s *fluxStory) want(name, text string) {
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

// wantStatus waits until the profile's summaries have a status.
func (s *fluxStory) wantStatus(profile, status string) {
	s.t.Helper()
	for cluster, namespace := range s.namespaces {
		s.eventually(profile+" on "+cluster+" is "+status, func() error {
			return s.wantStatuses(namespace, profile+"-sveltos-"+cluster, status)
		})
	}
}

// wantFailure waits until the profile's summaries have a message with the texts. The message has no password.
func (s *fluxStory) wantFailure(profile string, texts ...string) {
	s.t.Helper()
	for cluster, namespace := range s.namespaces {
		s.eventually(profile+" on "+cluster+" names what is wrong", func() error {
			var got configv1beta1.ClusterSummary
			if err := s.client(s.hub).Get(s.t.Context(), client.ObjectKey{Namespace: namespace, Name: profile + "-sveltos-" + cluster}, &got); err != nil {
				return err
			}
			message := failureOf(got)
			if strings.Contains(message, gitPassword) {
				s.t.Errorf("the message has the password: %s", message)
			}
			return wantTexts(message, texts)
		})
	}
}

// fingerprintsOf returns what the members have.
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

// wantUntouched compares what the members have with before, without the object of the profile plain.
func (s *fluxStory) wantUntouched(before map[string]fingerprint) {
	s.t.Helper()
	now := s.fingerprintsOf("flux-content")
	for _, name := range slices.Sorted(maps.Keys(before)) {
		if !strings.HasSuffix(name, " plain") && now[name] != before[name] {
			s.t.Errorf("%s has changed: %+v, before %+v", name, now[name], before[name])
		}
	}
}

// beforeFluxIsInstalled applies the profiles. The one without Flux is served.
func (s *fluxStory) beforeFluxIsInstalled() {
	s.t.Helper()
	s.kubectl(s.hub, "create", "namespace", "flux")
	s.plain("one")
	for name, spec := range fluxProfiles() {
		s.profile(name, spec)
	}
	s.want("plain", "one")
	s.wantFailure("git", "GitRepository flux/platform: the hub has no kind GitRepository", "is Flux's source-controller installed?")
	for name, kind := range fluxKinds() {
		s.wantFailure(name+"-chart", "hello", kind+" flux/platform: the hub has no kind "+kind)
		s.wantFailure(name+"-kustomized", kind+" flux/platform: the hub has no kind "+kind)
	}
}

// deliversAllSources creates the sources.
func (s *fluxStory) deliversAllSources() {
	s.t.Helper()
	s.oci, s.bucket = s.newOCIRepository("platform"), s.newBucketServer("platform")
	s.publish("one")
	s.git.pushFiles(map[string]string{"moved/here.yaml": fluxManifest("git-moved", "one")})
	s.apply(s.hub, fmt.Sprintf(fluxSources, gitPassword, ca(s.git.Server), s.git.URL+"/repo.git", s.oci.url, s.bucket.address))
	s.wantAll("one", "web", "db", "kustomized", "chart")
	s.want("git-moved", "one")
	for name := range fluxProfiles() {
		s.wantStatus(name, "Provisioned")
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

// publish makes files with the text the content of all sources: a commit, an artifact and objects.
func (s *fluxStory) publish(text string) {
	s.t.Helper()
	s.git.pushFiles(s.fluxFiles("git", text))
	s.oci.push(s.fluxFiles("oci", text))
	s.bucket.put(s.fluxFiles("bucket", text))
}

// wantAll waits until the objects of each kind of source have the text.
func (s *fluxStory) wantAll(text string, names ...string) {
	s.t.Helper()
	for kind := range fluxKinds() {
		for _, name := range names {
			s.want(kind+"-"+name, text)
		}
	}
}

// followsPushes changes manifests, kustomizations and charts in all sources.
func (s *fluxStory) followsPushes() {
	s.t.Helper()
	s.publish("two")
	s.wantAll("two", "web", "db", "kustomized", "chart")
	for name := range fluxProfiles() {
		s.wantStatus(name, "Provisioned")
	}
}

// namesBadContent pushes what cannot be deployed. What was delivered before stays.
func (s *fluxStory) namesBadContent() {
	s.t.Helper()
	before := s.fingerprintsOf("flux-content")
	s.git.git("-C", "work", "mv", "moved", "elsewhere")
	s.git.pushFiles(map[string]string{"apps/web/broken.yaml": "kind: [ConfigMap\n", "kustomized/base/kustomization.yaml": "resources: [gone.yaml]\n"})
	s.wantFailure("git", "GitRepository flux/platform", "apps/web/broken.yaml")
	s.wantFailure("git-kustomized", "GitRepository flux/platform, path kustomized/overlay", `kustomized/base/kustomization.yaml: resources: "gone.yaml" does not exist`)
	s.wantFailure("moved", `GitRepository flux/platform has no directory "moved"`)
	s.wantUntouched(before)
	s.git.git("-C", "work", "mv", "elsewhere", "moved")
	s.git.pushFiles(map[string]string{
		"apps/web/broken.yaml": fluxManifest("git-mended", "three"), "kustomized/base/kustomization.yaml": "resources: [kustomized.yaml]\n",
	})
	s.want("git-mended", "three")
	for _, name := range []string{"git", "git-kustomized", "moved"} {
		s.wantStatus(name, "Provisioned")
	}
}

// outlivesTheGitServer stops the Git server until Flux reports that.
func (s *fluxStory) outlivesTheGitServer() {
	s.t.Helper()
	before := s.fingerprintsOf("flux-content")
	s.git.Close()
	s.eventually("Flux reports that the Git server is away", func() error {
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
	s.plain("while the Git server is away")
	s.want("plain", "while the Git server is away")
	s.wantStatus("git", "Provisioned")
	s.wantUntouched(before)
}

// outlivesTheSource deletes the GitRepository.
func (s *fluxStory) outlivesTheSource() {
	s.t.Helper()
	before := s.fingerprintsOf("flux-content")
	s.kubectl(s.hub, "delete", "gitrepository", "-n", "flux", "platform")
	s.wantFailure("git", "GitRepository flux/platform does not exist")
	s.wantFailure("git-chart", "GitRepository flux/platform does not exist")
	s.wantFailure("git-kustomized", "GitRepository flux/platform does not exist")
	s.wantUntouched(before)
}

// outlivesTheController restarts the hub while source-controller does not run, and deploys another profile with content
// that the hub has.
func (s *fluxStory) outlivesTheController() {
	s.t.Helper()
	before := s.fingerprintsOf("flux-content")
	s.hubOS.kill()
	s.startHub()
	s.profile("late", "policyRefs: [{kind: OCIRepository, namespace: flux, name: platform, path: apps/web}]\n  tier: 50")
	s.plain("while source-controller is away")
	s.want("plain", "while source-controller is away")
	s.wantStatus("late", "Provisioned")
	s.wantStatus("bucket", "Provisioned")
	s.want("bucket-web", "two")
	delete(before, "pull-1 ConfigMap oci-web") // the profile with the lower tier takes it over
	delete(before, "push-1 ConfigMap oci-web")
	s.wantUntouched(before)
}

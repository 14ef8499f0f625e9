package stories

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

// parallelRequests is the number of reviews that are requested at once.
const parallelRequests = 32

// verbs are the verbs of all requests for resources.
var verbs = []string{"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"}

// grant is one permission.
type grant struct {
	// namespace is "" for a permission in all namespaces.
	namespace string
	// resource is written like configurationgroups.lib.projectsveltos.io/status.
	resource string
	// name is "" for a permission on all objects.
	name string
	verb string
}

// grants is a set of permissions.
type grants map[grant]bool

// allows returns whether a request is granted.
func (g grants) allows(want grant) bool {
	for _, namespace := range []string{want.namespace, ""} {
		for _, name := range []string{want.name, ""} {
			if g[grant{namespace, want.resource, name, want.verb}] {
				return true
			}
		}
	}
	return false
}

// lines returns the grants as text, one line for all verbs on a resource.
func (g grants) lines() []string {
	byTarget := map[grant][]string{}
	for one := range g {
		target := one
		target.verb = ""
		byTarget[target] = append(byTarget[target], one.verb)
	}
	var lines []string
	for target, verbs := range byTarget {
		slices.SortFunc(verbs, func(a, b string) int { return cmp.Compare(verbRank(a), verbRank(b)) })
		lines = append(lines, fmt.Sprintf("%-14s %-58s %-8s %s",
			cmp.Or(target.namespace, "everywhere"), target.resource, cmp.Or(target.name, "all"), strings.Join(verbs, ", ")))
	}
	slices.Sort(lines)
	return lines
}

func verbRank(verb string) int { return slices.Index(verbs, verb) }

// permission is a row of the table in SECURITY.md.
type permission struct {
	where, whose     string
	resources, verbs []string
}

// forAgent returns the permissions that the row gives one agent.
func (p permission) forAgent(a insider) (grants, error) {
	places := map[string]string{
		"its delivery namespace": a.delivery, "its execution space": a.delivery, "the cluster's namespace": a.namespace, "namespace `projectsveltos`": kube.AgentNamespace, "everywhere": "",
	}
	names := map[string]string{"all": "", "its own": a.cluster, "the key of its content": fleet.ContentKeySecret(a.cluster)}
	place, ok := places[p.where]
	name, ok2 := names[p.whose]
	if !ok || !ok2 {
		return nil, fmt.Errorf("the row %+v has an unknown place or owner, want one of %v and %v",
			p, slices.Sorted(maps.Keys(places)), slices.Sorted(maps.Keys(names)))
	}
	granted := grants{}
	for _, resource := range p.resources {
		for _, verb := range p.verbs {
			granted[grant{place, resource, name, verb}] = true
		}
	}
	return granted, nil
}

// permissions is a table in SECURITY.md.
type permissions []permission

var (
	quoted       = regexp.MustCompile("`([^`]+)`")
	tableHeading = "| where | resource | whose | verbs |\n|---|---|---|---|\n"
)

// documented reads the table.
func documented(t *testing.T) permissions {
	t.Helper()
	text, err := os.ReadFile("../../SECURITY.md")
	if err != nil {
		t.Fatal(err)
	}
	return parsePermissions(t, string(text))
}

// parsePermissions reads the first table of permissions in a text.
func parsePermissions(t *testing.T, text string) permissions {
	t.Helper()
	_, rest, found := strings.Cut(text, tableHeading)
	table, _, _ := strings.Cut(rest, "\n\n")
	if !found || table == "" {
		t.Fatalf("SECURITY.md has no table that begins with\n%s", tableHeading)
	}
	var rows permissions
	for line := range strings.Lines(table) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if len(cells) != 4 {
			t.Fatalf("SECURITY.md: the row %q has %d cells, want 4", line, len(cells))
		}
		row := permission{where: strings.TrimSpace(cells[0]), whose: strings.TrimSpace(cells[2])}
		for _, match := range quoted.FindAllStringSubmatch(cells[1], -1) {
			row.resources = append(row.resources, match[1])
		}
		for verb := range strings.SplitSeq(cells[3], ",") {
			row.verbs = append(row.verbs, strings.TrimSpace(verb))
		}
		rows = append(rows, row)
	}
	return rows
}

// forAgent returns the permissions that the table gives one agent.
func (p permissions) forAgent(t *testing.T, a insider) grants {
	t.Helper()
	all := grants{}
	for _, row := range p {
		granted, err := row.forAgent(a)
		if err != nil {
			t.Fatal(err)
		}
		maps.Copy(all, granted)
	}
	return all
}

// surface has the resources and objects that the hub serves.
type surface struct {
	namespaces []string
	// resources includes subresources. namespaced has the namespaced ones.
	resources  []string
	namespaced map[string]bool
	// objects has the names of all objects, by namespace and resource, but not for subresources.
	objects map[[2]string][]string
}

// surface reads all resources and objects of the hub, as its administrator.
func (w *world) surface() surface {
	w.t.Helper()
	_, lists, err := kubernetes.NewForConfigOrDie(w.hub.Config).Discovery().ServerGroupsAndResources()
	if err != nil {
		w.t.Fatal(err)
	}
	s := surface{namespaced: map[string]bool{}, objects: map[[2]string][]string{}}
	seen := map[string]bool{}
	for _, list := range lists {
		version, err := schema.ParseGroupVersion(list.GroupVersion)
		if err != nil {
			w.t.Fatal(err)
		}
		for _, r := range list.APIResources {
			name := resourceName(version.Group, r.Name)
			if seen[name] {
				continue
			}
			seen[name] = true
			s.resources = append(s.resources, name)
			s.namespaced[name] = r.Namespaced
			if slices.Contains(r.Verbs, "list") && !strings.Contains(r.Name, "/") {
				w.collect(&s, version.WithResource(r.Name), name)
			}
		}
	}
	s.namespaces = s.objects[[2]string{"", "namespaces"}]
	return s
}

// collect adds the names of all objects of a resource.
func (w *world) collect(s *surface, resource schema.GroupVersionResource, name string) {
	w.t.Helper()
	config := rest.CopyConfig(w.hub.Config)
	config.WarningHandler = rest.NoWarnings{} // deprecated kinds are listed, too
	list, err := metadata.NewForConfigOrDie(config).Resource(resource).List(w.t.Context(), metav1.ListOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	for _, item := range list.Items {
		key := [2]string{item.Namespace, name}
		s.objects[key] = append(s.objects[key], item.Name)
	}
}

// resourceName is resource.group/subresource.
func resourceName(group, resource string) string {
	if group == "" {
		return resource
	}
	resource, subresource, has := strings.Cut(resource, "/")
	if has {
		return resource + "." + group + "/" + subresource
	}
	return resource + "." + group
}

// wantAllowed requests a review for every verb on every resource: in all namespaces, in each namespace, and on each
// object by name. It logs the permissions, and compares them with the documented ones.
func (w *world) wantAllowed(a insider, s surface, documented permissions) {
	w.t.Helper()
	began := time.Now()
	reviewer := w.newAccessReviewer(a)
	got := grants{}
	asked := 0
	for _, questions := range []func(surface, insider) []grant{anythingAnywhere, anythingInNamespaces, namedObjects} {
		open := slices.DeleteFunc(questions(s, a), got.allows) // a wider permission is granted
		asked += len(open)
		for i, yes := range reviewer.ask(open) {
			if yes {
				got[open[i]] = true
			}
		}
	}
	w.t.Logf("the agent of %s/%s, with the delivery namespace %s, lacks %d permissions (%.1f s) and has these:\n%s",
		a.namespace, a.cluster, a.delivery, asked-len(got), time.Since(began).Seconds(), strings.Join(got.lines(), "\n"))
	if diff := gocmp.Diff(documented.forAgent(w.t, a).lines(), got.lines()); diff != "" {
		w.t.Errorf("permissions of the agent of %s (-SECURITY.md +hub):\n%s", a.cluster, diff)
	}
}

func anythingAnywhere(s surface, _ insider) (questions []grant) {
	for _, resource := range s.resources {
		questions = append(questions, everyVerb(grant{resource: resource})...)
	}
	return questions
}

func anythingInNamespaces(s surface, _ insider) (questions []grant) {
	for _, resource := range s.resources {
		for _, namespace := range s.namespaces {
			if s.namespaced[resource] {
				questions = append(questions, everyVerb(grant{namespace: namespace, resource: resource})...)
			}
		}
	}
	return questions
}

// namedObjects returns questions about each object, except for the ones in every cluster, and about the agent's own
// name in its namespaces.
func namedObjects(s surface, a insider) (questions []grant) {
	for _, resource := range s.resources {
		whole, _, _ := strings.Cut(resource, "/")
		for key, names := range s.objects {
			if key[1] != whole {
				continue
			}
			for _, name := range slices.DeleteFunc(slices.Clone(names), func(name string) bool { return isInEveryCluster(key[0], name) }) {
				questions = append(questions, verbsByName(grant{key[0], resource, name, ""})...)
			}
		}
		for _, namespace := range []string{a.namespace, a.delivery, kube.AgentNamespace} {
			if s.namespaced[resource] {
				questions = append(questions, verbsByName(grant{namespace, resource, a.cluster, ""})...)
			}
		}
	}
	return questions
}

// isInEveryCluster returns whether every cluster has an object of this name.
func isInEveryCluster(namespace, name string) bool {
	return strings.HasPrefix(namespace, "kube-") || namespace == "" && strings.HasPrefix(name, "system:")
}

func everyVerb(g grant) []grant {
	questions := make([]grant, 0, len(verbs))
	for _, verb := range verbs {
		g.verb = verb
		questions = append(questions, g)
	}
	return questions
}

// verbsByName omits the verbs whose requests name no object.
func verbsByName(g grant) []grant {
	return slices.DeleteFunc(everyVerb(g), func(g grant) bool {
		return g.verb == "deletecollection" || g.verb == "create" && !strings.Contains(g.resource, "/")
	})
}

// accessReviewer requests reviews of permissions with an agent's credential.
type accessReviewer struct {
	w   *world
	hub kubernetes.Interface
}

func (w *world) newAccessReviewer(a insider) accessReviewer {
	config := rest.CopyConfig(a.config)
	config.ContentType = "application/vnd.kubernetes.protobuf" // there are many thousands of questions
	return accessReviewer{w: w, hub: kubernetes.NewForConfigOrDie(config)}
}

// ask returns the answers, in the order of the questions.
func (a accessReviewer) ask(questions []grant) []bool {
	a.w.t.Helper()
	ctx, cancel := context.WithTimeout(a.w.t.Context(), waitTimeout)
	defer cancel()
	answers, failures := make([]bool, len(questions)), make([]error, parallelRequests)
	next := make(chan int)
	var workers sync.WaitGroup
	for worker := range parallelRequests {
		workers.Go(func() {
			for i := range next {
				var err error
				if answers[i], err = a.may(ctx, questions[i]); err != nil {
					failures[worker] = err
				}
			}
		})
	}
	for i := range questions {
		next <- i
	}
	close(next)
	workers.Wait()
	for _, err := range failures {
		if err != nil {
			a.w.t.Fatal(err)
		}
	}
	return answers
}

func (a accessReviewer) may(ctx context.Context, g grant) (bool, error) {
	whole, subresource, _ := strings.Cut(g.resource, "/")
	resource, group, _ := strings.Cut(whole, ".")
	review, err := a.hub.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, &authorizationv1.SelfSubjectAccessReview{
		Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &authorizationv1.ResourceAttributes{
			Namespace: g.namespace, Verb: g.verb, Group: group, Resource: resource, Subresource: subresource, Name: g.name,
		}},
	}, metav1.CreateOptions{})
	if err != nil {
		return false, fmt.Errorf("ask for %+v: %w", g, err)
	}
	return review.Status.Allowed, nil
}

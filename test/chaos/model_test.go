package chaos

import (
	"fmt"
	"maps"
	"slices"
)

// environments are the values of the label env, which profiles select.
func environments() []string { return []string{"a", "b", "c"} }

// profile is the model of a ClusterProfile with the objects of one ConfigMap of the hub.
type profile struct {
	name     string
	selects  string // the value of the label env of its clusters
	edition  int
	isAbsent bool
}

// objects returns the texts of the ConfigMaps on a member by their names. From each edition to the next, one object
// stays, one changes, one is added and one is deleted.
func (p *profile) objects() map[string]string {
	return map[string]string{
		p.name + "-kept":    "always the same",
		p.name + "-changed": fmt.Sprintf("edition %d", p.edition),
		fmt.Sprintf("%s-only-in-%d", p.name, p.edition): "comes and goes",
	}
}

// model is the desired state of the fleet.
type model struct {
	profiles []*profile
	// chart is the edition of the chart on all members.
	chart int
	// env has the label of each registered member, by its name.
	env map[string]string
}

func newModel() *model {
	m := &model{env: map[string]string{}}
	for i, env := range environments() {
		m.profiles = append(m.profiles, &profile{name: fmt.Sprintf("content-%d", i), selects: env})
	}
	return m
}

// selected returns the profiles with content for a member.
func (m *model) selected(member string) []*profile {
	env, isRegistered := m.env[member]
	return slices.DeleteFunc(slices.Clone(m.profiles), func(p *profile) bool { return !isRegistered || p.isAbsent || p.selects != env })
}

// objects returns the ConfigMaps that a member must have.
func (m *model) objects(member string) map[string]string {
	all := map[string]string{}
	for _, p := range m.selected(member) {
		maps.Copy(all, p.objects())
	}
	return all
}

// summaries returns the names of the ClusterSummaries that the hub must have.
func (m *model) summaries() []string {
	var all []string
	for member := range m.env {
		all = append(all, chartProfile+"-sveltos-"+member)
		for _, p := range m.selected(member) {
			all = append(all, p.name+"-sveltos-"+member)
		}
	}
	slices.Sort(all)
	return all
}

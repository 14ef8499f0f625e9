package render

import (
	"encoding/json"
	"fmt"
	"os"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	kubejson "k8s.io/apimachinery/pkg/util/json"

	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/sandbox"
	"github.com/towline/towline/internal/source"
)

// renderFunction is the name of the function in the sandbox that renders a chart. renderLimit is its time limit, which
// includes all calls of lookup.
const (
	renderFunction = "render"
	renderLimit    = 30 * time.Second
)

// SandboxFunctions returns the functions for the children of the sandbox that Charts, Changer, KustomizationRenderer
// and source.Subject use.
func SandboxFunctions() map[string]sandbox.Function {
	functions := source.ExpandFunctions()
	functions[renderFunction], functions[patchFunction], functions[buildFunction] = renderInSandbox, patchInSandbox, buildInSandbox
	return functions
}

// rendering is the input of renderFunction.
type rendering struct {
	Request ChartRequest
	// Archive is the archive of the chart.
	Archive []byte
	// RecordsAPIs is true if ChartRequest.checkedAPIs is not nil.
	RecordsAPIs bool
	// Member is nil for a rendering for all members.
	Member *memberInputs
}

// memberInputs are the inputs of newMemberCalls. With them, a chart is rendered for a single member.
type memberInputs struct {
	Stored    Generated
	HasLookup bool
	Inputs    string
}

// renderedRelease is the output of renderFunction: a Release with all fields.
type renderedRelease struct {
	Objects                    json.RawMessage
	Paths                      []string
	Chart, Defaults            json.RawMessage
	Notes                      string
	Generated                  Generated
	Unanswered, MemberSpecific bool
	Size                       int
	IsTransient, NeedsMember   bool
	CheckedAPIs                map[string]bool
}

// evaluate renders a chart without the caches of c: in the sandbox, or in this process if there is no sandbox.
func (c *Charts) evaluate(request ChartRequest, member *memberInputs) (Release, error) {
	if c.sandbox == nil {
		return request.render(request.callsFor(member, request.Lookup))
	}
	key, err := request.key()
	if err != nil {
		return Release{}, err
	}
	if member != nil {
		// The sandbox rejects a key that has exceeded its limits. Objects of one member must not stop the renderings
		// for other members.
		key += " " + request.Owner
	}
	archive, err := os.ReadFile(request.Chart.Path)
	if err != nil {
		return Release{}, fmt.Errorf("load chart %s %s: %w", request.Chart.Name, request.Chart.Version, err)
	}
	var rendered renderedRelease
	err = c.sandbox.Call(sandbox.Call{
		Function: renderFunction, Key: renderFunction + " " + key, Limit: renderLimit,
		Input:  rendering{Request: request, Archive: archive, RecordsAPIs: request.checkedAPIs != nil, Member: member},
		Output: &rendered,
		Callback: func(input json.RawMessage) (any, error) {
			var call [4]string
			if err := json.Unmarshal(input, &call); err != nil {
				return nil, err
			}
			return request.Lookup(call[0], call[1], call[2], call[3])
		},
	})
	release, decodeErr := rendered.decode()
	if err != nil {
		return release, err
	}
	return release, decodeErr
}

// renderInSandbox renders a chart in a child.
func renderInSandbox(input json.RawMessage, callBack func(any) (json.RawMessage, error)) (any, error) {
	var r rendering
	if err := json.Unmarshal(input, &r); err != nil {
		return nil, err
	}
	r.Request.archive = r.Archive
	if r.RecordsAPIs {
		r.Request.checkedAPIs = map[string]bool{}
	}
	var lookup LookupFunc
	if r.Member != nil && r.Member.HasLookup {
		lookup = func(apiVersion, kind, namespace, name string) (map[string]any, error) {
			raw, err := callBack([4]string{apiVersion, kind, namespace, name})
			if err != nil {
				return nil, err
			}
			var found map[string]any
			return found, kubejson.Unmarshal(raw, &found) // integers stay integers
		}
	}
	release, err := r.Request.render(r.Request.callsFor(r.Member, lookup))
	encoded, encodeErr := encodeRelease(release)
	if err != nil {
		return encoded, err
	}
	return encoded, encodeErr
}

// callsFor returns the template functions of a rendering: for all members if member is nil.
func (r ChartRequest) callsFor(member *memberInputs, lookup LookupFunc) *templateCalls {
	if member == nil {
		return newSharedCalls()
	}
	return newMemberCalls(member.Stored, lookup, member.Inputs, r.IsUpgrade)
}

func encodeRelease(r Release) (renderedRelease, error) {
	objects := make([]map[string]any, 0, len(r.Objects))
	for _, object := range r.Objects {
		objects = append(objects, object.Object)
	}
	raw, err := json.Marshal(objects)
	if err != nil {
		return renderedRelease{}, fmt.Errorf("encode the objects: %w", err)
	}
	return renderedRelease{
		Objects: raw, Paths: r.Paths, Chart: r.Chart, Defaults: r.Defaults, Notes: r.Notes, Generated: r.Generated,
		Unanswered: r.Unanswered, MemberSpecific: r.MemberSpecific, Size: r.size, IsTransient: r.IsTransient,
		NeedsMember: r.needsMember, CheckedAPIs: r.checkedAPIs,
	}, nil
}

// decode returns the Release.
func (r renderedRelease) decode() (Release, error) {
	release := Release{
		Paths: r.Paths, Chart: r.Chart, Defaults: r.Defaults, Notes: r.Notes, Generated: r.Generated,
		Unanswered: r.Unanswered, MemberSpecific: r.MemberSpecific, size: r.Size, IsTransient: r.IsTransient,
		needsMember: r.NeedsMember, checkedAPIs: r.CheckedAPIs,
	}
	if len(r.Objects) == 0 {
		return release, nil
	}
	var objects []any
	if err := kubejson.Unmarshal(r.Objects, &objects); err != nil { // integers stay integers
		return Release{}, fmt.Errorf("decode the objects: %w", err)
	}
	for _, object := range objects {
		fields, _ := object.(map[string]any)
		release.Objects = append(release.Objects, &unstructured.Unstructured{Object: fields})
	}
	release.Documents = kube.NewDocuments(release.Objects)
	return release, nil
}
